// A CUDA device that is the current one for a while.
#pragma once

#include "cuda/platform.h"

namespace fastlin {
namespace cuda {

// Makes a device the current one for as long as it lives.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    error = cudaGetDevice(&before_);
    if (error == cudaSuccess && before_ != device) error = set(device);
  }
  ~OnDevice() { set(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  cudaError_t error;

 private:
  // An error that is returned here: CUDA would report it again after the next launch.
  static cudaError_t set(int device) {
    const cudaError_t error = cudaSetDevice(device);
    if (error != cudaSuccess) cudaGetLastError();
    return error;
  }

  int before_ = 0;
};

}  // namespace cuda
}  // namespace fastlin
