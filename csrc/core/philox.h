// Every random number of fastlin is a pure function of (seed, step, stream, sequence, draw), by Philox4x32-10
// (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011):
//
//   key      word 0   seed, low 32 bits
//            word 1   seed, high 32 bits
//   counter  word 0   draw block, 24 bits         | (stream & 0xff) << 24
//            word 1   sequence, low 32 bits
//            word 2   sequence, high 32 bits
//            word 3   step, 24 bits               | (stream >> 8) << 24
//
// The stream has 16 bits. Draw j of a sequence is word j % 4 of block j / 4, so a sequence has 2^26 draws.
//   uniform j        u_j = (w_j + 1/2) 2^-32, exact in double
//   normals 2i,2i+1  r cos(2 pi u_{2i+1}), r sin(2 pi u_{2i+1})   with r = sqrt(-2 log u_{2i})
//
// philox-inl.h has the rounds, normal-inl.h normals in float, chi-inl.h normals in double and chi variates:
// templates over the lanes, which are vectors on a CPU and single numbers on a GPU. fastlin/data/place.py has
// the version of the draws.
#pragma once

#include <cstdint>

// Marks a function that a GPU runs as well; the CUDA sources define it as __host__ __device__.
#ifndef FASTLIN_HD
#define FASTLIN_HD
#endif

namespace fastlin {

constexpr std::int64_t kMaxBlocks = std::int64_t{1} << 24;
constexpr std::int64_t kMaxSteps = std::int64_t{1} << 24;
constexpr std::int64_t kMaxStreams = std::int64_t{1} << 16;
constexpr std::int64_t kBlocksPerChi = 256;  // 512 attempts

}  // namespace fastlin
