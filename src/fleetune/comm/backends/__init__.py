"""Backends of torch.distributed that torch's wheels do not have; `fleetune.comm.ccl` is what a script imports.

`csrc` holds what they share, in C++, and a folder for each library that they run over (`transport.h` is the seam).
"""
