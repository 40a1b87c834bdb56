// What oneCCL's static library leaves open: two functions of Intel's compiler, the pointers of its tracing interface,
// which are empty where nobody traces, and hwloc, which says here that it knows nothing of this machine.
//
// A symbol that is asked for but does not exist would keep the module from being loaded; all of them stay inside of it.

#include <cstddef>
#include <cstring>

#define INSIDE extern "C" __attribute__((visibility("hidden")))
#define NO_TRACE(name) INSIDE void* name; void* name = nullptr;
#define FAILS(name) INSIDE int name() { return -1; }
#define KNOWS_NOTHING(name) INSIDE void* name() { return nullptr; }

INSIDE void* _intel_fast_memcpy(void* to, const void* from, std::size_t bytes) { return std::memcpy(to, from, bytes); }
INSIDE void* _intel_fast_memset(void* to, int value, std::size_t bytes) { return std::memset(to, value, bytes); }

NO_TRACE(__itt_domain_create_ptr__3_0)
NO_TRACE(__itt_event_create_ptr__3_0)
NO_TRACE(__itt_event_end_ptr__3_0)
NO_TRACE(__itt_event_start_ptr__3_0)
NO_TRACE(__itt_metadata_add_ptr__3_0)
NO_TRACE(__itt_string_handle_create_ptr__3_0)
NO_TRACE(__itt_task_begin_ptr__3_0)
NO_TRACE(__itt_task_end_ptr__3_0)
NO_TRACE(__itt_thread_set_name_ptr__3_0)

FAILS(hwloc_topology_init)
FAILS(hwloc_topology_load)
FAILS(hwloc_topology_set_io_types_filter)
FAILS(hwloc_get_proc_cpubind)
FAILS(hwloc_get_area_membind)
FAILS(hwloc_set_membind)
FAILS(hwloc_get_type_depth)
FAILS(hwloc_memattr_get_value)
FAILS(hwloc_obj_attr_snprintf)
FAILS(hwloc_obj_type_snprintf)
FAILS(hwloc_bitmap_first)
FAILS(hwloc_bitmap_next)
FAILS(hwloc_bitmap_only)
FAILS(hwloc_bitmap_and)
FAILS(hwloc_bitmap_isincluded)
FAILS(hwloc_bitmap_isset)
FAILS(hwloc_bitmap_iszero)
FAILS(hwloc_bitmap_weight)
FAILS(hwloc_bitmap_taskset_snprintf)
FAILS(hwloc_free)

KNOWS_NOTHING(hwloc_alloc_membind)
KNOWS_NOTHING(hwloc_bitmap_alloc)
KNOWS_NOTHING(hwloc_bitmap_free)
KNOWS_NOTHING(hwloc_bitmap_zero)
KNOWS_NOTHING(hwloc_get_obj_by_depth)
KNOWS_NOTHING(hwloc_obj_type_string)
KNOWS_NOTHING(hwloc_topology_destroy)
KNOWS_NOTHING(hwloc_topology_get_support)
