// oneCCL's library for CPUs as a transport, with messages between two ranks over TCP.

#pragma once

#include <string>

#include "transport.h"

namespace fleetune {

/** See `Seat`; `address` is the IP address of this host that messages are received on. */
std::unique_ptr<Transport> make_ccl_transport(const Seat& seat, const std::string& address);

/** What oneCCL says of its version. */
std::string ccl_version();

}  // namespace fleetune
