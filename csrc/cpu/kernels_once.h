// All kernels, over the Vec of the file FASTLIN_VEC. Included once for each instruction set, in its
// namespace.
// clang-format off: each file uses those before it.
#include FASTLIN_VEC
#include "core/parts-inl.h"
#include "core/philox-inl.h"
#include "core/normal-inl.h"
#include "core/chi-inl.h"
#include "core/tile-inl.h"
#include "cpu/tile-inl.h"
#include "cpu/tokens-inl.h"
#include "cpu/quads-inl.h"
#include "cpu/quad_gram-inl.h"
#include "cpu/context-inl.h"
#include "core/draws-inl.h"
#include "core/sampler-inl.h"
#include "cpu/chunk-inl.h"
#include "core/stack-inl.h"
#include "cpu/data-inl.h"
#include "cpu/trials-inl.h"
#include "cpu/attention-inl.h"
#include "cpu/workers-inl.h"
#include "cpu/columns_parameters-inl.h"
#include "cpu/columns-inl.h"
#include "cpu/columns_by_task-inl.h"
#include "cpu/fill-inl.h"
#include "cpu/sample-inl.h"
#include "cpu/kernels-inl.h"
// clang-format on
