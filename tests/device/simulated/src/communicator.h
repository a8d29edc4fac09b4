// A process group with the semantics of NCCL's: collectives are tasks on a stream of the communicator's own.
//
// The current stream makes the communicator's stream wait for the input, `Work.wait()` makes the current stream wait for
// the output, and the host waits for neither. The first call of a group meets all of its ranks on the host. The bytes
// travel by gloo; sums are made here, in the order of the ranks, so that their bits are those of hpfunc on CPUs.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <exception>

#include "tensors.h"

namespace simulated {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// So many collectives may run at a time, as if each took all of its share of the device; 0: any number.
void set_max_in_flight(int count);

class Communicator final : public c10d::Backend {
 public:
  Communicator(c10::intrusive_ptr<c10d::Backend> transport, int rank, int size);

  const std::string getBackendName() const override {
    return "simulated";
  }
  bool supportsCoalescing() const override {
    return true;
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int peer, int tag) override;
  WorkPtr recv(Tensors& tensors, int peer, int tag) override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return 0;
  }
  void abort() override;
  void shutdown() override;
  // Whether a collective has lost a rank. It stays on the device until the group is given up, as a kernel of NCCL's does.
  c10d::ErrorType getError() override;

 private:
  using Run = std::function<void()>;

  WorkPtr launch(const char* name, const Tensors& inputs, const Tensors& outputs, bool on_own_stream, Run run);
  WorkPtr exchange(bool sends, Tensors& tensors, int peer);
  void meet();
  DeviceStream& stream(int device);

  const c10::intrusive_ptr<c10d::Backend> transport_;
  std::map<int, DeviceStream*> streams_;
  bool has_met_ = false;
  const std::shared_ptr<std::atomic<bool>> is_aborted_ = std::make_shared<std::atomic<bool>>(false);
  const std::shared_ptr<std::atomic<bool>> has_failed_ = std::make_shared<std::atomic<bool>>(false);

  // Between startCoalescing and endCoalescing.
  struct Together {
    Tensors inputs, outputs;
    std::vector<std::function<WorkPtr()>> starts;
  };
  std::optional<Together> together_;
};

}  // namespace simulated
