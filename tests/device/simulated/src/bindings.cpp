// What Python sees of the device, beside torch's own interface.
#include <c10/util/intrusive_ptr.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "communicator.h"

PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true)

namespace simulated {

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  register_hooks();
  observe_ranges();

  module.def("communicator", [](c10::intrusive_ptr<c10d::Backend> transport, int rank, int size) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Communicator>(std::move(transport), rank, size));
  });

  module.def("get_error", [](c10d::Backend& library) { return library.getError(); });

  module.def("num_devices", [] { return Runtime::get().num_devices; });

  // --- settings
  module.def("set_delay", [](const std::string& part, int delay_us) { Runtime::get().set_delay(part, delay_us); });
  module.def("set_fault", [](const std::string& name, uint64_t every) { Runtime::get().faults.set(name, every); });
  module.def("clear_faults", [] { Runtime::get().faults.clear(); });
  module.def("set_max_in_flight", &set_max_in_flight);
  module.def("set_hang_s", [](double seconds) { Runtime::get().hang_s = seconds; });
  module.def("raise_on_race", [](bool raises) { Runtime::get().raises_on_race = raises; });
  module.def("raise_on_sync", [](bool raises) { Runtime::get().raises_on_sync = raises; });
  module.def("name_stream", [](size_t id, const std::string& name) { Runtime::get().rename(id, name); });

  // --- what happened
  module.def("clear", [] {
    Runtime::get().clear();
    clear_memory_counts();
  });
  module.def("races", [] { return Runtime::get().found_races(); });
  module.def("errors", [] { return Runtime::get().errors(); });
  module.def("launches", [] { return Runtime::get().launches(); });
  module.def("syncs", [] { return Runtime::get().syncs(); });
  module.def("events", [] { return Runtime::get().events(); });
  module.def("memory", [] { return memory_counts(); });
  module.def("standing", [] { return Runtime::get().standing(); });

  // --- random numbers
  module.def("random_state", [] { return pybind11::bytes(random_state()); });
  module.def("set_random_state", [](const pybind11::bytes& state) { set_random_state(state); });
  module.def("set_random_seed", &set_random_seed);
}

}  // namespace simulated
