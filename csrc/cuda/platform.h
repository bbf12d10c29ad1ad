// CUDA for the kernels' sources: nvcc's own, or with FASTLIN_EMULATED the emulation on the CPU, which runs
// the very same sources in tests.
#pragma once

#ifdef FASTLIN_EMULATED

#include "testing/cuda_shim.h"

#define FASTLIN_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  ::fastlin::emulated::launch(kernel, grid, block, shared_bytes, stream, __VA_ARGS__)

#define FASTLIN_SHARED_MEMORY(name) unsigned char* const name = ::fastlin::emulated::shared_memory()

#else

#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>

#define FASTLIN_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)

// The start of the block's dynamic shared memory, at a multiple of 16 bytes.
#define FASTLIN_SHARED_MEMORY(name)                                      \
  extern __shared__ __align__(16) unsigned char fastlin_shared_memory[]; \
  unsigned char* const name = fastlin_shared_memory

// Barrier `number` of `threads` threads, whole warps: threads may wait for it at different places.
__device__ inline void sync_named(unsigned number, unsigned threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

#endif

// A value that the compiler must take as new: keeps loads that depend on it inside a loop.
__device__ inline int opaque(int x) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+r"(x));
#endif
  return x;
}

// The same for an address of global memory.
template <class T>
__device__ inline T* opaque(T* x) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+l"(x));
#endif
  return x;
}

struct alignas(16) Quad {
  float x[4];
};
// 128 bits of shared or global memory at a multiple of 16 bytes.
__device__ inline Quad load_quad(const float* from) { return *reinterpret_cast<const Quad*>(from); }
__device__ inline void store_quad(float* to, const Quad& quad) { *reinterpret_cast<Quad*>(to) = quad; }
// To global memory: the compiler makes four stores of `store_quad` there.
__device__ inline void store_quad_global(float* to, const Quad& quad) {
#ifdef __CUDA_ARCH__
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "f"(quad.x[0]),
               "f"(quad.x[1]), "f"(quad.x[2]), "f"(quad.x[3])
               : "memory");
#else
  store_quad(to, quad);
#endif
}
