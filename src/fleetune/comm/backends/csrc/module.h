// What the Python module of every backend offers; the module itself adds what is its own (module_ccl.cpp, ...).

#pragma once

#include <string>
#include <torch/csrc/utils/pybind.h>

#include "transport.h"

namespace fleetune {

/** Defines, in a Python module:
 *
 *    create(store, rank, size, timeout, global_ranks, address, host, silence_limit) -> torch's Backend
 *        Called on all ranks of a group. `address` is an IP address of this host on the network that all ranks share,
 *        for liveness; `host` its name in messages. A `silence_limit` of 0 means no liveness.
 *    close_all() -> None
 *        Leaves all groups that were not destroyed: to be called before the interpreter goes.
 */
void define_backend(pybind11::module_& module, const std::string& name, MakeTransport make_transport);

}  // namespace fleetune
