// The generic kernels: any width, dtype, number of heads and tasks, and gradients of the data. As in
// launch.h, on the current device.
#pragma once

#include "cuda/launch.h"

namespace fastlin {
namespace cuda {

template <class T>
std::int64_t generic_bytes(const Problem<T>&, const Results<T>&, int device);
template <class T>
int generic_attention(const Problem<T>&, const Results<T>&, void* workspace, int device, void* stream);

template <class T>
std::int64_t generic_gram_bytes(std::int64_t B, std::int64_t n, std::int64_t m, int device);
template <class T>
int generic_gram(const T* z, std::int64_t batch, std::int64_t row,  // [B, n, m] and its strides
                 std::int64_t B, std::int64_t n, std::int64_t m, T* G, void* workspace, int device,
                 void* stream);

template <class T>
std::int64_t generic_sample_bytes(const Source&, std::int64_t B, bool is_gram, int device);
template <class T>
int generic_sample(const Source&, std::int64_t B, bool is_gram, const Sample<T>&, void* workspace, int device,
                   void* stream);
int generic_sample_tasks(const Source&, std::int64_t B, std::int64_t* task, int device, void* stream);

}  // namespace cuda
}  // namespace fastlin
