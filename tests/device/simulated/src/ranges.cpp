// Which range of `record_function` a thread is in: so tasks get the names that their caller gave them.
#include <ATen/record_function.h>

#include <string>
#include <vector>

#include "runtime.h"

namespace simulated {

static thread_local std::vector<std::string> ranges;

static std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& range) {
  const std::string name = range.name();
  const size_t place = name.find("::");  // "library::op": which library it was, all of them say
  ranges.push_back(place == std::string::npos ? name : name.substr(place + 2));
  return nullptr;
}

static void leave(const at::RecordFunction&, at::ObserverContext*) {
  if (!ranges.empty()) ranges.pop_back();
}

std::string current_range() {
  return ranges.empty() ? "" : ranges.back();
}

void observe_ranges() {
  at::addGlobalCallback(at::RecordFunctionCallback(enter, leave).scopes({at::RecordScope::USER_SCOPE}));
}

}  // namespace simulated
