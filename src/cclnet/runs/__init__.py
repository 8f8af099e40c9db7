"""The run folder: the only code that reads or writes its files. It does not import torch."""
