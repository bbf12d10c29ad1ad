// What the kernels use and does not depend on the instruction set. It is included before a target region begins:
// an inline function that is compiled inside one could be the copy that the linker keeps for every machine.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "cpu/arena.h"
#include "cpu/parallel.h"
#include "cpu/plan.h"
#include "cpu/records.h"
#include "kernels.h"
