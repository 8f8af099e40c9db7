"""The network inside training loops that people already have; each file needs the framework it is named after."""
