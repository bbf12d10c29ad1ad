// Headers of the kernels that do not depend on the instruction set. Include this before a target region
// begins: the linker might keep the copy of an inline function that was compiled inside the region, and run
// it on every machine.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

#include "core/arena.h"
#include "core/philox.h"
#include "cpu/parallel.h"
#include "cpu/plan.h"
#include "cpu/records.h"
#include "kernels.h"

// FASTLIN_UNROLL comes before a loop of constant length over vectors: without it GCC keeps arrays of vectors
// in memory, with a store after each multiply-add.
//
// FASTLIN_INLINE is for functions on arrays of vectors: a call would put the arrays into memory.
#define FASTLIN_INLINE __attribute__((always_inline)) inline
#define FASTLIN_NOINLINE __attribute__((noinline))

// A target region: its functions are compiled for an instruction set that other machines may lack.
#define FASTLIN_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define FASTLIN_BEGIN_TARGET(features) \
  FASTLIN_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define FASTLIN_END_TARGET FASTLIN_PRAGMA(clang attribute pop)
#define FASTLIN_UNROLL FASTLIN_PRAGMA(clang loop unroll(full))
#else
#define FASTLIN_BEGIN_TARGET(features) FASTLIN_PRAGMA(GCC push_options) FASTLIN_PRAGMA(GCC target(features))
#define FASTLIN_END_TARGET FASTLIN_PRAGMA(GCC pop_options)
#define FASTLIN_UNROLL FASTLIN_PRAGMA(GCC unroll 16)
#endif
