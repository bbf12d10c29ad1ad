// Which kernels serve a call, and where its workspace lies: float32 calls of one attention head by the
// families of family.h, all others by the generic kernels.
#include "cuda/device.cuh"
#include "cuda/generic.h"
#include "cuda/launch.h"
#include "cuda/on_device.h"

namespace fastlin {
namespace cuda {
namespace {

// Of records: a larger batch comes in pieces. Few in emulation, where 512 MB would be minutes.
#ifdef FASTLIN_EMULATED
constexpr std::int64_t kRecordBytes = std::int64_t{32} << 10;
#else
constexpr std::int64_t kRecordBytes = std::int64_t{512} << 20;
#endif

enum class Path { kTrials, kTokens, kDrawn, kStack, kGeneric };

const char* name_of(Path path) {
  constexpr const char* kNames[] = {"trials", "tokens", "drawn", "stack", "generic"};
  return kNames[static_cast<int>(path)];
}

template <class T>
Path choose(const Problem<T>& P, const Results<T>& out, const Device& device) {
  if constexpr (sizeof(T) == sizeof(float)) {
    const bool is_generic = P.H != 1 || P.K > kMostTasks || width_for(P.m) == 0 || P.shares_v ||
                            out.dx != nullptr || out.dq != nullptr || device.shared_bytes < kSharedBytes;
    if (is_generic) return Path::kGeneric;
    if (P.source != nullptr) {
      if (drawn_serves(P, out, *P.source)) return Path::kDrawn;
      if (!form_drawn_serves(*P.source)) return Path::kGeneric;
    } else if (tokens_serve(P, out)) {
      return Path::kTokens;
    }
    if (stack_serves(P, out)) return Path::kStack;
    if (trials_serve(P, out)) return Path::kTrials;
  }
  return Path::kGeneric;
}

Work work_of(const Problem<float>& given, const Results<float>& out) {
  const Record at(given, out);
  const std::int64_t chunk = chunk_of(given);
  const Source source = given.source != nullptr ? *given.source : Source{};
  Problem<float> P = given;
  if (P.source != nullptr) P.is_gram = false;  // their Gram matrices are not stored
  return {P, out,     source, at, Numbers(P, out, at), chunk, (P.B + chunk - 1) / chunk, nullptr, nullptr,
          0, nullptr, 0,      0};
}

// A call of the fast kernels, its workspace, and the pieces that it comes in.
struct Fast {
  Path path;
  Work work;
  bool makes_records;
  std::int64_t chunks_each, bytes;  // of a piece; of the workspace
  double* sums;

  Fast(Path path, const Problem<float>& P, const Results<float>& out, void* workspace)
      : path(path),
        work(work_of(P, out)),
        makes_records(path == Path::kStack || (path == Path::kTrials && !work.P.is_gram)),
        chunks_each(std::max<std::int64_t>(work.chunks, 1)) {
    Workspace parts(workspace);
    work.partial = parts.take<float>(work.chunks * work.numbers.count);
    sums = parts.take<double>(P.K * P.R * work.at.width);
    if (counts_tasks()) {
      work.counts = parts.take<int>(kCountRows * P.K);
      work.count_rows = kCountRows;
    }
    if (makes_records) {
      const std::int64_t floats = record_floats(width_for(P.m));
      chunks_each = std::clamp<std::int64_t>(kRecordBytes / (work.chunk * floats * 4), 1, chunks_each);
      work.records = parts.take<float>(std::min(chunks_each * work.chunk, P.B) * floats);
    }
    bytes = parts.used();
  }

  bool counts_tasks() const {
    return work.P.K > 1 && work.P.counts == nullptr &&
           (work.out.per_task != nullptr || work.P.weight != nullptr);
  }
  bool draws() const { return work.P.source != nullptr; }

  int run(void* stream) {
    const bool forms_count = counts_tasks() && makes_records && chunks_each >= work.chunks;
    int error = 0;
    if (counts_tasks() && !(forms_count && work.P.B > 0)) error = launch_count(work, stream);
    for (std::int64_t first = 0; error == 0 && first < work.chunks; first += chunks_each) {
      const std::int64_t chunks = std::min(chunks_each, work.chunks - first);
      work.first = first * work.chunk;
      work.records_count = std::min(chunks * work.chunk, work.P.B - work.first);
      if (makes_records) {
        error =
            draws() ? launch_form_drawn(work, forms_count, stream) : launch_form(work, forms_count, stream);
      }
      if (error == 0) error = run_piece(first, chunks, stream);
    }
    return error != 0 ? error : launch_finish(work, sums, stream);
  }

 private:
  int run_piece(std::int64_t first, std::int64_t chunks, void* stream) const {
    switch (path) {
      case Path::kTokens:
        return launch_tokens(work, first, chunks, stream);
      case Path::kDrawn:
        return launch_drawn(work, first, chunks, stream);
      case Path::kStack:
        return launch_stack(work, first, chunks, stream);
      default:
        return launch_trials(work, first, chunks, stream);
    }
  }
};

}  // namespace

std::string describe(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

std::string why_not() {
  int devices = 0;
  const int error = static_cast<int>(cudaGetDeviceCount(&devices));
  constexpr int kInsufficientDriver = 35;  // what a machine without a driver says too
  if (error == kInsufficientDriver) return "there is no NVIDIA driver, or it is too old: " + describe(error);
  if (error != 0) return describe(error);
  return devices > 0 ? "" : "there is no CUDA device";
}

template <class T>
std::string kernels_for(const Problem<T>& P, const Results<T>& out, int device) {
  return name_of(choose(P, out, Device(device)));
}

template <class T>
std::int64_t workspace_bytes(const Problem<T>& P, const Results<T>& out, int device) {
  const Path path = choose(P, out, Device(device));
  if constexpr (sizeof(T) == sizeof(float)) {
    if (path != Path::kGeneric) return Fast(path, P, out, nullptr).bytes;
  }
  return generic_bytes(P, out, device);
}

template <class T>
int attention(const Problem<T>& P, const Results<T>& out, void* workspace, int device, void* stream) {
  const OnDevice guard(device);
  if (guard.error != cudaSuccess) return static_cast<int>(guard.error);
  const Path path = choose(P, out, Device(device));
  if constexpr (sizeof(T) == sizeof(float)) {
    if (path != Path::kGeneric) return Fast(path, P, out, workspace).run(stream);
  }
  return generic_attention(P, out, workspace, device, stream);
}

template <class T>
std::int64_t gram_bytes(std::int64_t B, std::int64_t n, std::int64_t m, int device) {
  return generic_gram_bytes<T>(B, n, m, device);
}

template <class T>
int gram(const T* z, std::int64_t batch, std::int64_t row, std::int64_t B, std::int64_t n, std::int64_t m,
         T* G, void* workspace, int device, void* stream) {
  const OnDevice guard(device);
  if (guard.error != cudaSuccess) return static_cast<int>(guard.error);
  return generic_gram(z, batch, row, B, n, m, G, workspace, device, stream);
}

template <class T>
std::int64_t sample_bytes(const Source& S, std::int64_t B, bool is_gram, int device) {
  return generic_sample_bytes<T>(S, B, is_gram, device);
}

template <class T>
int sample(const Source& S, std::int64_t B, bool is_gram, const Sample<T>& out, void* workspace, int device,
           void* stream) {
  const OnDevice guard(device);
  if (guard.error != cudaSuccess) return static_cast<int>(guard.error);
  return generic_sample(S, B, is_gram, out, workspace, device, stream);
}

int sample_tasks(const Source& S, std::int64_t B, std::int64_t* task, int device, void* stream) {
  const OnDevice guard(device);
  if (guard.error != cudaSuccess) return static_cast<int>(guard.error);
  return generic_sample_tasks(S, B, task, device, stream);
}

#define FASTLIN_INSTANTIATE(T)                                                                          \
  template std::string kernels_for(const Problem<T>&, const Results<T>&, int);                          \
  template std::int64_t workspace_bytes(const Problem<T>&, const Results<T>&, int);                     \
  template int attention(const Problem<T>&, const Results<T>&, void*, int, void*);                      \
  template std::int64_t gram_bytes<T>(std::int64_t, std::int64_t, std::int64_t, int);                   \
  template int gram(const T*, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, T*, \
                    void*, int, void*);                                                                 \
  template std::int64_t sample_bytes<T>(const Source&, std::int64_t, bool, int);                        \
  template int sample(const Source&, std::int64_t, bool, const Sample<T>&, void*, int, void*);
FASTLIN_INSTANTIATE(float)
FASTLIN_INSTANTIATE(double)
#undef FASTLIN_INSTANTIATE

}  // namespace cuda
}  // namespace fastlin
