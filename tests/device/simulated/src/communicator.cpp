#include "communicator.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

namespace simulated {

// --- how many run at a time ------------------------------------------------------------------------------------------
namespace {

struct Places {
  std::mutex lock;
  std::condition_variable changed;
  int most = 0;
  int taken = 0;
};
Places& places() {
  static auto* all = new Places();
  return *all;
}

// A collective's place on the device. One that was given up while it waited for a place takes none.
class Place {
 public:
  explicit Place(const std::atomic<bool>& is_aborted) {
    std::unique_lock<std::mutex> hold(places().lock);
    places().changed.wait(hold, [&] { return places().most == 0 || places().taken < places().most || is_aborted; });
    ++places().taken;
  }
  ~Place() {
    {
      std::lock_guard<std::mutex> guard(places().lock);
      --places().taken;
    }
    places().changed.notify_all();
  }
};

// Whether the group of the collective that this thread runs was given up.
thread_local const std::atomic<bool>* group_is_aborted = nullptr;

// Waits as a kernel does that polls its peers: until the collective is complete, or its group was given up. A single
// send or receive of gloo says only to who waits for it that it is complete.
void finish(const WorkPtr& work) {
  while (!work->isCompleted()) {
    TORCH_CHECK(!group_is_aborted->load(), "the communicator was given up");
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  work->wait();
}

// What a collective's task tells its work.
struct Outcome {
  std::mutex lock;
  std::exception_ptr error;
};

class DeviceWork final : public c10d::Work {
 public:
  DeviceWork(EventPtr end, int device, std::shared_ptr<Outcome> outcome, Tensors tensors)
      : end_(std::move(end)), device_(device), outcome_(std::move(outcome)), tensors_(std::move(tensors)) {}

  bool isCompleted() override {
    return end_->stream->has_done(end_->task);
  }
  bool isSuccess() const override {
    return exception() == nullptr;
  }
  std::exception_ptr exception() const override {
    std::lock_guard<std::mutex> guard(outcome_->lock);
    return outcome_->error;
  }
  void synchronize() override {
    const bool forgets = Runtime::get().faults.strikes(Fault::forgotten_work_wait);
    if (!forgets) Runtime::get().add_edge(current_stream(device_), end_);
    tensors_.clear();  // from here on they are safe in the order of the waiting stream
  }
  // Without a timeout the host goes on, as with NCCL; with one it waits, and learns of errors.
  bool wait(std::chrono::milliseconds timeout) override {
    synchronize();
    if (timeout == kNoTimeout) return true;
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(Runtime::get().hang_s);
    while (!isCompleted() && exception() == nullptr && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    if (const auto error = exception()) std::rethrow_exception(error);
    Runtime::get().synchronize(end_, "Work.wait(timeout)");  // which says where a device stands still
    return true;
  }

 private:
  const EventPtr end_;
  const int device_;
  const std::shared_ptr<Outcome> outcome_;
  Tensors tensors_;  // the caller may drop its own at once
};

Accesses accesses_of(const Tensors& inputs, const Tensors& outputs) {
  Accesses accesses;
  for (const auto& tensor : inputs) accesses.reads.push_back(bytes_of(tensor));
  for (const auto& tensor : outputs) accesses.writes.push_back(bytes_of(tensor));
  return accesses;
}

Tensors all_on_host(const Tensors& tensors) {
  Tensors views;
  for (const auto& tensor : tensors) views.push_back(on_host(tensor));
  return views;
}

void check_sum(const c10d::ReduceOp& op) {
  TORCH_CHECK(op == c10d::ReduceOp::SUM, "simulated device: its collectives know sums only");
}

}  // namespace

void set_max_in_flight(int count) {
  {
    std::lock_guard<std::mutex> guard(places().lock);
    places().most = count;
  }
  places().changed.notify_all();
}

// --- launches --------------------------------------------------------------------------------------------------------
Communicator::Communicator(c10::intrusive_ptr<c10d::Backend> transport, int rank, int size)
    : Backend(rank, size), transport_(std::move(transport)) {}

DeviceStream& Communicator::stream(int device) {
  auto& stream = streams_[device];
  if (stream == nullptr) stream = &Runtime::get().add_stream(device, "communicator " + getGroupDesc());
  return *stream;
}

// ncclCommInitRank, which the first call makes, returns when all ranks have called it.
void Communicator::meet() {
  if (has_met_) return;
  transport_->barrier()->wait();
  has_met_ = true;
}

WorkPtr Communicator::launch(const char* name, const Tensors& inputs, const Tensors& outputs, bool on_own_stream,
                             Run run) {
  meet();
  Runtime& runtime = Runtime::get();
  const int device = (outputs.empty() ? inputs : outputs).at(0).device().index();
  DeviceStream& current = current_stream(device);
  DeviceStream& own = on_own_stream ? stream(device) : current;
  if (!runtime.faults.strikes(Fault::early_collective)) runtime.add_edge(own, runtime.record(current, false));
  if (runtime.faults.strikes(Fault::failed_communicator)) abort();
  auto outcome = std::make_shared<Outcome>();
  // The transport is held, and not this group: the host may forget that before the device has got here.
  runtime.enqueue(own, name, accesses_of(inputs, outputs),
                  [run = std::move(run), outcome, is_aborted = is_aborted_, has_failed = has_failed_,
                   transport = transport_] {
                    try {
                      Place place(*is_aborted);
                      group_is_aborted = is_aborted.get();
                      TORCH_CHECK(!*is_aborted, "the communicator was given up");
                      run();
                    } catch (...) {
                      *has_failed = true;
                      {
                        std::lock_guard<std::mutex> guard(outcome->lock);
                        outcome->error = std::current_exception();
                      }
                      while (!*is_aborted) std::this_thread::sleep_for(std::chrono::microseconds(100));
                      throw;
                    }
                  });
  Tensors tensors = inputs;
  tensors.insert(tensors.end(), outputs.begin(), outputs.end());
  return c10::make_intrusive<DeviceWork>(runtime.record(own, false), device, outcome, std::move(tensors));
}

void Communicator::abort() {
  *is_aborted_ = true;
  places().changed.notify_all();
  transport_->abort();
}

c10d::ErrorType Communicator::getError() {
  return *has_failed_ ? c10d::ErrorType::REMOTE_ERROR : c10d::ErrorType::SUCCESS;
}

void Communicator::shutdown() {
  *is_aborted_ = true;
  places().changed.notify_all();
  transport_->shutdown();
}

// --- collectives -----------------------------------------------------------------------------------------------------
// Each is called in the thread of a stream, on memory that the device calls its own.
static void gather_by(c10d::Backend& transport, at::Tensor output, const at::Tensor& input) {
  auto copied = input.contiguous().clone();  // gloo refuses an input that is a part of the output
  finish(transport._allgather_base(output, copied));
}

static void add_rows(at::Tensor output, const at::Tensor& rows) {
  const auto row = [&](int64_t index) { return rows[index].view_as(output); };
  if (rows.size(0) == 1) {
    output.copy_(row(0));
    return;
  }
  at::add_out(output, row(0), row(1));
  for (int64_t index = 2; index < rows.size(0); ++index) output.add_(row(index));
}

static void reduce_scatter_by(c10d::Backend& transport, const at::Tensor& output, at::Tensor input) {
  auto rows = at::empty_like(input);
  std::vector<int64_t> equal;
  finish(transport.alltoall_base(rows, input, equal, equal));
  add_rows(output, rows.view({transport.getSize(), -1}));
}

static void all_reduce_by(c10d::Backend& transport, const at::Tensor& tensor) {
  auto rows = at::empty({transport.getSize() * tensor.numel()}, tensor.options());
  gather_by(transport, rows, tensor.reshape({-1}));
  add_rows(tensor, rows.view({transport.getSize(), -1}));
}

WorkPtr Communicator::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  Tensors outputs{output}, inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

WorkPtr Communicator::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& options) {
  const auto run = [to = all_on_host(outputs), from = all_on_host(inputs), transport = transport_] {
    for (size_t i = 0; i < to.size(); ++i) gather_by(*transport, to[i], from[i]);
  };
  return launch("all_gather", inputs, outputs, options.asyncOp, run);
}

WorkPtr Communicator::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

WorkPtr Communicator::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::ReduceScatterOptions& options) {
  check_sum(options.reduceOp);
  const auto run = [to = all_on_host(outputs), from = all_on_host(inputs), transport = transport_] {
    for (size_t i = 0; i < to.size(); ++i) reduce_scatter_by(*transport, to[i], from[i]);
  };
  return launch("reduce_scatter", inputs, outputs, options.asyncOp, run);
}

WorkPtr Communicator::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  check_sum(options.reduceOp);
  const auto run = [tensor = on_host(tensors.at(0)), transport = transport_] { all_reduce_by(*transport, tensor); };
  return launch("all_reduce", tensors, tensors, options.asyncOp, run);
}

WorkPtr Communicator::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const auto run = [tensor = on_host(tensors.at(0)), root = options.rootRank, transport = transport_] {
    c10d::BroadcastOptions from;
    from.rootRank = root;
    Tensors all{tensor};
    finish(transport->broadcast(all, from));
  };
  return launch("broadcast", tensors, tensors, options.asyncOp, run);
}

WorkPtr Communicator::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                                    std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) {
  const auto run = [to = on_host(output), from = on_host(input), output_sizes, input_sizes, transport = transport_] {
    at::Tensor received = to, sent = from;
    auto to_sizes = output_sizes, from_sizes = input_sizes;
    finish(transport->alltoall_base(received, sent, to_sizes, from_sizes));
  };
  return launch("all_to_all", {input}, {output}, options.asyncOp, run);
}

// --- point to point --------------------------------------------------------------------------------------------------
WorkPtr Communicator::exchange(bool sends, Tensors& tensors, int peer) {
  const auto start = [tensor = on_host(tensors.at(0)), sends, peer, transport = transport_] {
    Tensors one{tensor};
    return sends ? transport->send(one, peer, 0) : transport->recv(one, peer, 0);
  };
  if (together_) {
    (sends ? together_->inputs : together_->outputs).push_back(tensors.at(0));
    together_->starts.push_back(start);
    return nullptr;
  }
  const Tensors none;
  return launch(sends ? "send" : "recv", sends ? tensors : none, sends ? none : tensors, true,
                [start] { start()->wait(); });
}

WorkPtr Communicator::send(Tensors& tensors, int peer, int) {
  return exchange(true, tensors, peer);
}

WorkPtr Communicator::recv(Tensors& tensors, int peer, int) {
  return exchange(false, tensors, peer);
}

void Communicator::startCoalescing() {
  together_.emplace();
}

WorkPtr Communicator::endCoalescing() {
  const Together all = std::move(*together_);
  together_.reset();
  if (all.starts.empty()) return nullptr;
  return launch("send and recv", all.inputs, all.outputs, true, [starts = all.starts] {
    std::vector<WorkPtr> works;
    for (const auto& start : starts) works.push_back(start());
    for (const auto& work : works) work->wait();
  });
}

WorkPtr Communicator::barrier(const c10d::BarrierOptions& options) {
  return transport_->barrier(options);
}

}  // namespace simulated
