"""From image files to batches on the device: table, split, decode once, load, augment."""
