"""The kernels, in Triton. Importing them imports triton, and reads TRITON_INTERPRET once and for all."""
