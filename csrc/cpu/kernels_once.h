// Every kernel, over the Vec that comes before: included once for each instruction set, in its namespace.
#include "cpu/tile-inl.h"
#include "cpu/context-inl.h"
#include "cpu/chunk-inl.h"
#include "cpu/stack-inl.h"
#include "cpu/attention-inl.h"
#include "cpu/kernels-inl.h"
