"""What does the work of a gather that also converts.

twin.py            plain torch, on any device: the meaning of all the others; row by row in the cache on a CPU
triton_gather.py   one kernel for CUDA: rows by index, normalised, cropped, mirrored, cast on the way
choose.py          which of them an output gets
"""
