// Sequences by task: sort.cu.
#pragma once

#include <cstdint>

namespace fastlin {
namespace cuda {

constexpr std::int64_t kMostRows = 512, kMostCounts = 1 << 22;  // of a table of counts [rows, K]

// Rows of the table of counts that `launch_sort` needs.
std::int64_t sort_rows(std::int64_t B, std::int64_t K);

// Counts [rows, K] of the tasks of `rows` equal parts of a batch.
int launch_counts(const std::int64_t* task, std::int64_t B, std::int64_t K, std::int64_t rows, int* counts,
                  void* stream);

// Sequences [B] in the stable order of their tasks, these tasks [B], and where each one starts [K + 1].
int launch_sort(const std::int64_t* task, std::int64_t B, std::int64_t K, int* counts, std::int64_t* sequence,
                std::int64_t* sorted, std::int64_t* start, void* stream);

}  // namespace cuda
}  // namespace fastlin
