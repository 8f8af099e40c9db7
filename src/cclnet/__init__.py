"""CCL-Net: soft labels learned from how alike the classes of your images look."""

from cclnet.errors import InputError
from cclnet.head import CCLHead
from cclnet.methods import METHODS, Loss, Method, build_method
from cclnet.network import CCLNet

__version__ = "0.1.0"

__all__ = ["METHODS", "CCLHead", "CCLNet", "InputError", "Loss", "Method", "__version__", "build_method"]
