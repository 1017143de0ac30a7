"""Stand-ins for what is not at hand here. None of them is the real thing, and each refuses what the real one refuses.

``strict``: torch.distributed as it is under NCCL, Ascend's HCCL and Habana's HCCL, over a Gloo process group.
``threads``: a communicator with any capabilities, between threads of one process.
"""
