// Reductions that a library cannot do, or not exactly, on memory of this process.

#pragma once

#include <cstddef>

#include "transport.h"

namespace fleetune {

/** out[i] = reduction of blocks[b * count + i] over b, divided by `divisor`.
 *
 *  Half-precision numbers are added up in float32, in the order of the blocks, and rounded once, to the nearest even.
 *  Integers wrap around, and a division of them goes towards zero. `out` may be the first block. */
void reduce_blocks(
    const void* blocks, size_t num_blocks, size_t count, void* out, Element element, Reduction reduction, int divisor);

}  // namespace fleetune
