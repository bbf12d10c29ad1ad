// The launchers of the CUDA kernels, on plain pointers to device memory: what bindings.cpp calls. A launcher
// enqueues on the stream that it is given; it does not synchronise, allocate or copy, so that CUDA graphs can
// capture it. It returns a cudaError_t: 0, or why nothing was enqueued.
#pragma once

#include <cstdint>
#include <string>

#include "kernels.h"

namespace fastlin {
namespace cuda {

// Why no kernel can run here; empty when a device is there.
std::string why_not();
std::string describe(int error);

// Bytes of device memory that `attention` works in on a device.
template <class T>
std::int64_t workspace_bytes(const Problem<T>&, const Results<T>&, int device);

// `source` points to host memory, its arrays are on the device.
template <class T>
int attention(const Problem<T>&, const Results<T>&, void* workspace, int device, void* stream);

// The kernels that `attention` runs: "trials", "tokens", "drawn", "stack" (float32) or "generic".
template <class T>
std::string kernels_for(const Problem<T>&, const Results<T>&, int device);

// Bytes of device memory that `gram` works in.
template <class T>
std::int64_t gram_bytes(std::int64_t B, std::int64_t n, std::int64_t m, int device);

template <class T>
int gram(const T* z, std::int64_t batch, std::int64_t row,  // [B, n, m] and its strides
         std::int64_t B, std::int64_t n, std::int64_t m, T* G, void* workspace, int device, void* stream);

// Bytes of device memory that `sample` works in.
template <class T>
std::int64_t sample_bytes(const Source&, std::int64_t B, bool is_gram, int device);

template <class T>
int sample(const Source&, std::int64_t B, bool is_gram, const Sample<T>&, void* workspace, int device,
           void* stream);

int sample_tasks(const Source&, std::int64_t B, std::int64_t* task, int device, void* stream);  // [B]

}  // namespace cuda
}  // namespace fastlin
