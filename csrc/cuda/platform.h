// CUDA for the kernels' sources: nvcc's own, or with FASTLIN_EMULATED the emulation on the CPU, which runs
// the very same sources in tests.
#pragma once

#ifdef FASTLIN_EMULATED

#include "testing/cuda_shim.h"

#define FASTLIN_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  ::fastlin::emulated::launch(kernel, grid, block, shared_bytes, stream, __VA_ARGS__)

#define FASTLIN_SHARED_MEMORY(name) unsigned char* const name = ::fastlin::emulated::shared_memory()

#else

#include <cuda_runtime.h>

#define FASTLIN_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)

// The start of the block's dynamic shared memory, at a multiple of 16 bytes.
#define FASTLIN_SHARED_MEMORY(name)                                      \
  extern __shared__ __align__(16) unsigned char fastlin_shared_memory[]; \
  unsigned char* const name = fastlin_shared_memory

#endif
