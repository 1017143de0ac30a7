"""Other programs' files: torch's, torch.distributed.checkpoint's and Hugging Face's, read and written.

Readers give a :class:`~shardrt.state.portable.PortableState` whose tensors are read piece by piece, and writers take
one: in one process, with no process group, and with memory for a window of it.
"""

from shardrt.interchange.dcp_reading import read_dcp
from shardrt.interchange.dcp_writing import write_dcp
from shardrt.interchange.detecting import KINDS, detect
from shardrt.interchange.hf import read_hf
from shardrt.interchange.hf_writing import write_hf
from shardrt.interchange.torch_files import read_torch, write_torch

__all__ = ["KINDS", "detect", "read_dcp", "read_hf", "read_torch", "write_dcp", "write_hf", "write_torch"]
