// The Python module of the backend `ccl`.

#include "ccl/transport_ccl.h"
#include "module.h"

PYBIND11_MODULE(fleetune_ccl, module) {
  fleetune::define_backend(module, "ccl", fleetune::make_ccl_transport);
  module.def("version", &fleetune::ccl_version);
}
