// A stand-in accelerator: torch's PrivateUse1 device, computed by the CPU, that behaves like a card
// in the worst case. Two devices, 16 streams each.
//
// Kernels are the CPU's and run at once. These differences from a CPU make mistakes visible:
//   device -> pinned host, non_blocking   the host sees NaN until it waits for stream or event
//   pinned host -> device, non_blocking   host memory is read as late as possible
//   freed device memory                   is NaN, and reused at once, unless record_stream was called
//   fresh device memory                   is NaN
//   streams                               an access without an event in between is reported
//   two devices in one operator           raise, as on a card
//   deterministic mode                    raises for operators without a deterministic CUDA kernel
//   an index out of range                 breaks the device: every later call raises
//   memory                                has a limit, with torch's OutOfMemoryError beyond it
//   random draws                          come from a generator of the device
//   float64                               raises if asked to, as on cards that have none
//   threads                               are listed with the devices that they use
//
// Order between streams is checked by vector clocks: each stream counts its operations, and knows
// up to which operation of every other stream it has waited. It cannot show the bits of real
// kernels, fused attention, cuBLAS, NCCL or speed.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_cpu_dispatch.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kDevices = 2, kStreamsPerDevice = 16, kStreams = kDevices * kStreamsPerDevice;
constexpr size_t kAllocationBytes = 512, kMostReports = 200;
constexpr uint8_t kPoisonByte = 0xFF;  // NaN in every float format, -1 in every integer
constexpr auto kType = c10::DeviceType::PrivateUse1;

using Time = uint64_t;  // of a stream: the number of operations submitted to it
using Times = std::array<Time, kStreams>;

// A range of device memory. A freed range is reused by the next allocation of its size and stream.
struct Allocation {
  void* data = nullptr;
  size_t bytes = 0;
  int device = 0;
  int stream = 0;  // of the allocation
  int write_stream = -1;
  Time write_time = 0;
  std::string writer;
  std::map<int, Time> reads;     // the time of the last read, by stream
  std::map<int, Time> recorded;  // the time of record_stream, by stream
};

struct DeferredCopy {
  Time time;
  std::function<void()> run;
};

struct Event {
  int stream = -1;
  Time time = 0;
  Times waited{};
};

struct State {
  std::recursive_mutex mutex;
  Times time{}, done{}, host_waited{};
  std::array<Times, kStreams> waited{};
  std::array<std::deque<DeferredCopy>, kStreams> deferred;
  int locks = 0;                       // nested locks of the thread that holds the mutex
  std::vector<DeferredCopy> finished;  // to be destroyed after the mutex is unlocked
  std::map<uintptr_t, Allocation*> allocations;  // by address
  std::map<std::tuple<int, int, size_t>, std::vector<Allocation*>> unused;
  std::vector<Allocation*> freed_in_use;  // until the recorded streams are done
  std::map<uintptr_t, size_t> pinned;
  std::vector<std::string> reports;
  std::map<std::string, int64_t> counts;
  int64_t kernel_bytes = 0;  // read and written by kernels
  std::set<std::pair<int, int>> touched;  // (device, thread)
  std::array<size_t, kDevices> used_bytes{}, peak_bytes{};
  size_t limit_bytes = SIZE_MAX;
  std::atomic<bool> is_hanging = false, has_float64 = true;
  std::string fault;  // the error that every call raises once the device is broken
  std::string next_fault;
  int64_t kernels_to_fault = -1;
  std::array<int, kDevices> next_stream{1, 1};
  std::array<at::Generator, kDevices> generators;
  State() {
    for (auto& generator : generators) generator = at::detail::createCPUGenerator();
  }
};

State& state() {
  static auto* instance = new State;  // never destroyed: tensors may outlive static destructors
  return *instance;
}

// Finished copies are destroyed after unlocking: destroying a tensor may wait for Python's lock,
// whose holder may wait for this mutex.
class Lock {
 public:
  explicit Lock(std::recursive_mutex& mutex) : mutex_(mutex) {
    mutex_.lock();
    ++state().locks;
  }
  ~Lock() {
    std::vector<DeferredCopy> finished;
    if (--state().locks == 0) finished.swap(state().finished);
    mutex_.unlock();
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  std::recursive_mutex& mutex_;
};

thread_local int current_device = 0;
thread_local std::array<int, kDevices> current_streams{};
thread_local int kernel_depth = 0;

struct KernelScope {
  KernelScope() { ++kernel_depth; }
  ~KernelScope() { --kernel_depth; }
};

int stream_key(int device, int stream) { return device * kStreamsPerDevice + stream; }
int stream_key(const c10::Stream& stream) {
  return stream_key(stream.device_index(), static_cast<int>(stream.id()));
}
int current_stream(int device) { return stream_key(device, current_streams[device]); }

void raise_if_broken() {
  TORCH_CHECK(state().fault.empty(), state().fault,
              "\nCUDA kernel errors might be asynchronously reported at some other API call");
}

// Record that the calling thread uses a device. On a card this creates a context, which takes
// memory.
void touch(int device) { state().touched.emplace(device, static_cast<int>(gettid())); }

// Streams and vector clocks.

void run_deferred(int stream, Time until) {
  auto& s = state();
  auto& queue = s.deferred[stream];
  while (!queue.empty() && queue.front().time <= until) {
    auto copy = std::move(queue.front());
    queue.pop_front();
    copy.run();
    s.finished.push_back(std::move(copy));
  }
  s.done[stream] = std::max(s.done[stream], std::min(until, s.time[stream]));
}

void merge(Times& into, const Times& other) {
  for (int stream = 0; stream < kStreams; ++stream)
    into[stream] = std::max(into[stream], other[stream]);
}

// Submit an operation to a stream; it comes after all operations that the host has waited for.
Time advance(int stream) {
  auto& s = state();
  touch(stream / kStreamsPerDevice);
  merge(s.waited[stream], s.host_waited);
  s.waited[stream][stream] = ++s.time[stream];
  return s.time[stream];
}

void wait_on_host(int stream) {
  auto& s = state();
  raise_if_broken();
  while (s.is_hanging) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  const Time until = s.time[stream];
  run_deferred(stream, until);
  s.host_waited[stream] = std::max(s.host_waited[stream], until);
  merge(s.host_waited, s.waited[stream]);
}

std::string stream_name(int stream) {
  return "stream " + std::to_string(stream % kStreamsPerDevice) + " of standin:" +
         std::to_string(stream / kStreamsPerDevice);
}

Allocation* find_allocation(const void* pointer) {
  auto& all = state().allocations;
  auto next = all.upper_bound(reinterpret_cast<uintptr_t>(pointer));
  if (next == all.begin()) return nullptr;
  auto& [start, allocation] = *--next;
  const auto end = start + std::max<size_t>(allocation->bytes, 1);
  return reinterpret_cast<uintptr_t>(pointer) < end ? allocation : nullptr;
}

void report(const std::string& text) {
  if (state().reports.size() < kMostReports) state().reports.push_back(text);
}

void note_access(const void* pointer, int stream, Time time, bool writes,
                 const std::string& operation) {
  auto* memory = find_allocation(pointer);
  if (!memory) return;
  const auto& waited = state().waited[stream];
  if (memory->write_stream >= 0 && memory->write_stream != stream &&
      waited[memory->write_stream] < memory->write_time)
    report(operation + " on " + stream_name(stream) + (writes ? " overwrites" : " reads") +
           " memory that " + memory->writer + " writes on " + stream_name(memory->write_stream) +
           ", without waiting for it");
  if (!writes) {
    memory->reads[stream] = time;
    return;
  }
  for (const auto& [reader, read_time] : memory->reads)
    if (reader != stream && waited[reader] < read_time)
      report(operation + " on " + stream_name(stream) + " overwrites memory that " +
             stream_name(reader) + " reads, without waiting for it");
  memory->reads.clear();
  memory->write_stream = stream;
  memory->write_time = time;
  memory->writer = operation;
}

// Memory.

void make_unused(Allocation* memory) {
  std::memset(memory->data, kPoisonByte, memory->bytes);
  state().unused[{memory->device, memory->stream, memory->bytes}].push_back(memory);
}

void release_finished() {
  auto& s = state();
  std::vector<Allocation*> still_used;
  for (auto* memory : s.freed_in_use) {
    bool is_done = true;
    for (const auto& [stream, time] : memory->recorded) {
      const auto& queue = s.deferred[stream];
      is_done &= s.done[stream] >= time && (queue.empty() || queue.front().time > time);
    }
    if (!is_done) {
      still_used.push_back(memory);
      continue;
    }
    for (const auto& [stream, time] : memory->recorded) memory->reads.erase(stream);
    memory->recorded.clear();
    make_unused(memory);
  }
  s.freed_in_use = std::move(still_used);
}

void free_device_memory(void* context) {
  auto* memory = static_cast<Allocation*>(context);
  Lock lock(state().mutex);
  auto& s = state();
  s.used_bytes[memory->device] -= memory->bytes;
  if (memory->recorded.empty()) {
    make_unused(memory);
    return;
  }
  for (auto& [stream, time] : memory->recorded) time = s.time[stream];
  s.freed_in_use.push_back(memory);
  release_finished();
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t requested_bytes) override {
    Lock lock(state().mutex);
    auto& s = state();
    const int device = current_device;
    const c10::Device on(kType, static_cast<c10::DeviceIndex>(device));
    if (requested_bytes == 0) return {nullptr, nullptr, &free_nothing, on};
    const size_t bytes =
        (requested_bytes + kAllocationBytes - 1) / kAllocationBytes * kAllocationBytes;
    touch(device);
    release_finished();
    TORCH_CHECK_WITH(OutOfMemoryError, s.used_bytes[device] + bytes <= s.limit_bytes,
                     "CUDA out of memory. Tried to allocate ", bytes >> 20, " MiB. GPU ", device,
                     " has a total capacity of ", s.limit_bytes >> 20, " MiB of which ",
                     (s.limit_bytes - s.used_bytes[device]) >> 20, " MiB is free.");
    const int stream = current_stream(device);
    auto& unused = s.unused[{device, stream, bytes}];
    Allocation* memory;
    if (!unused.empty()) {
      memory = unused.back();
      unused.pop_back();
    } else {
      memory = new Allocation;
      memory->bytes = bytes;
      memory->device = device;
      memory->stream = stream;
      TORCH_CHECK(posix_memalign(&memory->data, kAllocationBytes, bytes) == 0, "no host memory");
      s.allocations[reinterpret_cast<uintptr_t>(memory->data)] = memory;
    }
    std::memset(memory->data, kPoisonByte, bytes);
    s.used_bytes[device] += bytes;
    s.peak_bytes[device] = std::max(s.peak_bytes[device], s.used_bytes[device]);
    return {memory->data, memory, &free_device_memory, on};
  }
  static void free_nothing(void*) {}
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { state().counts["caches emptied"]++; }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    Lock lock(state().mutex);
    if (auto* memory = find_allocation(pointer.get()))
      memory->recorded[stream_key(stream)] = state().time[stream_key(stream)];
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock(state().mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      auto& all = (*bytes)[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
      all.current = static_cast<int64_t>(state().used_bytes[device]);
      all.peak = static_cast<int64_t>(state().peak_bytes[device]);
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock(state().mutex);
    state().peak_bytes[device] = state().used_bytes[device];
  }
};
DeviceMemory device_memory;
REGISTER_ALLOCATOR(kType, &device_memory);

void free_pinned(void* pointer) {
  Lock lock(state().mutex);
  state().pinned.erase(reinterpret_cast<uintptr_t>(pointer));
  std::free(pointer);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    Lock lock(state().mutex);
    void* pointer = nullptr;
    TORCH_CHECK(posix_memalign(&pointer, 4096, std::max<size_t>(bytes, 1)) == 0, "no host memory");
    std::memset(pointer, kPoisonByte, bytes);
    state().pinned[reinterpret_cast<uintptr_t>(pointer)] = bytes;
    touch(current_device);  // as CUDA does
    state().counts["pinned allocations"]++;
    return {pointer, pointer, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
PinnedMemory pinned_memory;

bool is_pinned(const void* pointer) {
  Lock lock(state().mutex);
  const auto& pinned = state().pinned;
  auto next = pinned.upper_bound(reinterpret_cast<uintptr_t>(pointer));
  if (next == pinned.begin()) return false;
  const auto& [start, bytes] = *--next;
  return reinterpret_cast<uintptr_t>(pointer) < start + std::max<size_t>(bytes, 1);
}

// The interfaces that torch requires of a device type.

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kType;
  static c10::Device device_of(int index) {
    return c10::Device(kType, static_cast<c10::DeviceIndex>(index));
  }
  static c10::Stream stream_of(int device, int stream) {
    return c10::Stream(c10::Stream::UNSAFE, device_of(device), stream);
  }
  static int index_of(c10::Device device) {
    return device.index() < 0 ? current_device : device.index();
  }
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return device_of(current_device); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "CUDA error: invalid device ordinal");
    if (device.index() >= 0) current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < kDevices) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override {
    return stream_of(index_of(device), current_streams[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(index_of(device), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    Lock lock(state().mutex);
    touch(index_of(device));
    int& next = state().next_stream[index_of(device)];
    const int stream = next;
    next = next + 1 < kStreamsPerDevice ? next + 1 : 1;
    return stream_of(index_of(device), stream);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int device = stream.device_index();
    auto before = stream_of(device, current_streams[device]);
    current_streams[device] = static_cast<int>(stream.id());
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock(state().mutex);
    return state().deferred[stream_key(stream)].empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Lock lock(state().mutex);
    state().counts["waits for a stream"]++;
    wait_on_host(stream_key(stream));
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    Lock lock(state().mutex);
    touch(device);
    state().counts["waits for a device"]++;
    for (int stream = 0; stream < kStreamsPerDevice; ++stream)
      wait_on_host(stream_key(device, stream));
  }

  void record(void** slot, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    Lock lock(state().mutex);
    auto*& event = reinterpret_cast<Event*&>(*slot);
    if (!event) event = new Event;
    event->stream = stream_key(stream);
    event->time = advance(event->stream);
    event->waited = state().waited[event->stream];
  }
  void block(void* slot, const c10::Stream& stream) const override {
    auto* event = static_cast<Event*>(slot);
    if (!event || event->stream < 0) return;
    Lock lock(state().mutex);
    auto& s = state();
    const int key = stream_key(stream);
    const Time time = advance(key);
    merge(s.waited[key], event->waited);
    const int from = event->stream;
    const Time until = event->time;
    s.deferred[key].push_back({time, [from, until] { run_deferred(from, until); }});
  }
  bool queryEvent(void* slot) const override {
    auto* event = static_cast<Event*>(slot);
    if (!event || event->stream < 0) return true;
    Lock lock(state().mutex);
    const auto& queue = state().deferred[event->stream];
    return queue.empty() || queue.front().time > event->time;
  }
  void synchronizeEvent(void* slot) const override {
    auto* event = static_cast<Event*>(slot);
    if (!event || event->stream < 0) return;
    Lock lock(state().mutex);
    auto& s = state();
    raise_if_broken();
    while (s.is_hanging) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    s.counts["waits for an event"]++;
    run_deferred(event->stream, event->time);
    merge(s.host_waited, event->waited);
  }
  void destroyEvent(void* slot, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(slot);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer,
                             const c10::Stream& stream) const override {
    device_memory.recordStream(pointer, stream);
  }
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 1.0; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    Guard().setDevice(c10::Device(kType, device));
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    setCurrentDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    const auto* memory = find_allocation(pointer);
    return Guard::device_of(memory ? memory->device : 0);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return state().generators[device < 0 ? current_device : device];
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    auto new_memory = device_memory.allocate(bytes);
    std::memcpy(new_memory.get(), storage.data(), std::min(bytes, storage.nbytes()));
    auto& resized = const_cast<c10::Storage&>(storage);
    resized.set_data_ptr(std::move(new_memory));
    resized.set_nbytes(bytes);
  }
};

// Operators.

bool is_ours(const at::Tensor& tensor) { return tensor.device().type() == kType; }

at::Tensor on_host(const at::Tensor& tensor) {
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), [](void*) {},
      tensor.options().device(at::kCPU));
}

void raise_if_unsupported(std::optional<c10::ScalarType> dtype) {
  TORCH_CHECK(state().has_float64 || dtype != c10::ScalarType::Double || kernel_depth,
              "Required aspect fp64 is not supported on the device");
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>,
                 std::optional<c10::MemoryFormat> format) {
  raise_if_unsupported(dtype);
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &device_memory,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device> device, std::optional<bool>) {
  raise_if_unsupported(dtype);
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &device_memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor copy_on_device(const at::Tensor& from, const at::Tensor& to) {
  const int stream = current_stream(from.device().index());
  run_deferred(stream, state().time[stream]);
  const Time time = advance(stream);
  note_access(from.data_ptr(), stream, time, false, "copy");
  note_access(to.data_ptr(), stream, time, true, "copy");
  if (from.device() != to.device()) {
    const int other = current_stream(to.device().index());
    note_access(to.data_ptr(), other, advance(other), true, "copy");
    state().counts["copies between devices"]++;
  }
  KernelScope kernel;
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (kernel_depth) {  // a copy within the CPU fallback, not one of the program
    auto target = is_ours(to) ? on_host(to) : to;
    target.copy_(is_ours(from) ? on_host(from) : from);
    return to;
  }
  raise_if_broken();
  Lock lock(state().mutex);
  auto& s = state();
  if (is_ours(from) && is_ours(to)) {
    s.kernel_bytes += static_cast<int64_t>(from.nbytes() + to.nbytes());
    return copy_on_device(from, to);
  }
  const bool to_host = is_ours(from);
  const auto& host = to_host ? to : from;
  const auto& device_tensor = to_host ? from : to;
  const char* operation = to_host ? "copy to host" : "copy to device";
  const int stream = current_stream(device_tensor.device().index());
  const bool is_plain = from.dtype() == to.dtype() && from.is_contiguous() && to.is_contiguous() &&
                        from.numel() == to.numel();
  const bool is_deferred = non_blocking && is_plain && is_pinned(host.data_ptr());
  s.counts[std::string(to_host ? "copies to host" : "copies to device") +
           (is_deferred ? ", deferred" : "")]++;
  if (!is_deferred) {
    run_deferred(stream, s.time[stream]);
    note_access(device_tensor.data_ptr(), stream, advance(stream), !to_host, operation);
    {
      KernelScope kernel;
      auto target = to_host ? to : on_host(to);
      target.copy_(to_host ? on_host(from) : from);
    }
    wait_on_host(stream);
    return to;
  }
  const Time time = advance(stream);
  note_access(device_tensor.data_ptr(), stream, time, !to_host, operation);
  void* target = to.data_ptr();
  const void* source = from.data_ptr();
  const size_t bytes = from.nbytes();
  if (to_host) std::memset(target, kPoisonByte, bytes);
  // Torch keeps pinned memory until the copy has run, but not device memory.
  const at::Tensor host_tensor = host;
  s.deferred[stream].push_back(
      {time, [target, source, bytes, host_tensor] { std::memcpy(target, source, bytes); }});
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar item(const at::Tensor& tensor) {
  raise_if_broken();
  Lock lock(state().mutex);
  const int stream = current_stream(tensor.device().index());
  note_access(tensor.data_ptr(), stream, advance(stream), false, "item");
  wait_on_host(stream);
  state().counts["items read"]++;
  return at::cpu::_local_scalar_dense(on_host(tensor));
}

const at::Tensor& resize(const at::Tensor& tensor, c10::SymIntArrayRef size,
                         std::optional<at::MemoryFormat> format) {
  return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), format);
}
at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef size) {
  return at::cpu::view_symint(tensor, size);
}
at::Tensor as_strided(const at::Tensor& tensor, c10::SymIntArrayRef size,
                      c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(tensor, size, stride, offset);
}
at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef size,
                         c10::SymIntArrayRef stride) {
  return at::cpu::_reshape_alias_symint(tensor, size, stride);
}
at::Tensor unfold(const at::Tensor& tensor, int64_t dimension, int64_t size, int64_t step) {
  return at::cpu::unfold(tensor, dimension, size, step);
}
at::Tensor& set_to_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return tensor.set_(source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
at::Tensor& set_to_storage(at::Tensor& tensor, at::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / tensor.element_size());
  return tensor.set_(std::move(source), 0, {elements}, {});
}
at::Tensor& set_to_storage_part(at::Tensor& tensor, at::Storage source, int64_t offset,
                                c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(tensor, std::move(source), offset, size, stride);
}
void record_stream(at::Tensor& tensor, at::Stream stream) {
  device_memory.recordStream(tensor.storage().data_ptr(), stream);
}

// The results of CUDA's kernels for these depend on the order of atomic additions, says torch's
// documentation of use_deterministic_algorithms. Integers in cumsum do not.
const std::set<std::string>& nondeterministic_operators() {
  static const std::set<std::string> names{
      "aten::_adaptive_avg_pool2d_backward", "aten::_adaptive_avg_pool3d_backward",
      "aten::_ctc_loss_backward", "aten::_embedding_bag_backward",
      "aten::adaptive_max_pool2d_backward", "aten::adaptive_max_pool2d_backward.grad_input",
      "aten::avg_pool3d_backward", "aten::bincount", "aten::cumsum", "aten::cumsum.out",
      "aten::fractional_max_pool2d_backward", "aten::grid_sampler_2d_backward",
      "aten::grid_sampler_3d_backward", "aten::kthvalue.values",
      "aten::max_pool3d_with_indices_backward", "aten::max_unpool2d", "aten::nll_loss2d_backward",
      "aten::nll_loss2d_forward", "aten::reflection_pad1d_backward",
      "aten::reflection_pad2d_backward", "aten::scatter_reduce.two_out",
      "aten::upsample_bicubic2d_backward", "aten::upsample_bilinear2d_backward",
      "aten::upsample_linear1d_backward", "aten::upsample_trilinear3d_backward"};
  return names;
}

struct Operand {
  at::Tensor tensor;
  bool is_written;
};

std::vector<Operand> collect_operands(const c10::FunctionSchema& schema,
                                      const torch::jit::Stack& stack) {
  std::vector<Operand> result;
  const auto first = stack.size() - schema.arguments().size();
  for (size_t index = first; index < stack.size(); ++index) {
    const auto* alias = schema.arguments()[index - first].alias_info();
    const bool is_written = alias && alias->isWrite();
    const auto& value = stack[index];
    if (value.isTensor() && value.toTensor().defined()) {
      result.push_back({value.toTensor(), is_written});
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector())
        result.push_back({tensor, is_written});
    } else if (value.isOptionalTensorList()) {
      for (const auto& tensor : value.toOptionalTensorVector())
        if (tensor && tensor->defined()) result.push_back({*tensor, false});
    }
  }
  return result;
}

// Return the device of the operands; raise an error if they are on several devices.
std::optional<c10::Device> common_device(const std::vector<Operand>& operands,
                                         const std::string& name) {
  std::optional<c10::Device> device;
  for (const auto& operand : operands)
    if (is_ours(operand.tensor) && !device) device = operand.tensor.device();
  if (!device) return device;
  const bool is_indexing = name.rfind("aten::index.", 0) == 0 ||
                           name.rfind("aten::index_put", 0) == 0 ||
                           name.rfind("aten::_index_put", 0) == 0;
  for (const auto& [tensor, is_written] : operands) {
    const bool is_host_scalar = tensor.dim() == 0 && tensor.is_cpu();
    const bool is_host_index = is_indexing && tensor.is_cpu() && !tensor.is_floating_point();
    TORCH_CHECK(tensor.device() == *device || is_host_scalar || is_host_index,
                "Expected all tensors to be on the same device, but found at least two devices, ",
                *device, " and ", tensor.device(), "! (in ", name, ")");
  }
  return device;
}

// Kernels draw from torch's CPU generator, so it has the state of the device's while they run.
struct DeviceGenerator {
  DeviceGenerator(const c10::OperatorHandle& op, int device) : device(device) {
    const auto tags = op.getTags();
    is_random = std::find(tags.begin(), tags.end(), at::Tag::nondeterministic_seeded) != tags.end();
    if (!is_random) return;
    host_state = host.get_state();
    host.set_state(state().generators[device].get_state());
  }
  ~DeviceGenerator() {
    if (!is_random) return;
    state().generators[device].set_state(host.get_state());
    host.set_state(host_state);
  }
  int device;
  bool is_random;
  at::Generator host = at::detail::getDefaultCPUGenerator();
  at::Tensor host_state;
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& s = state();
  raise_if_broken();
  const auto& schema = op.schema();
  const auto name = c10::toString(op.operator_name());
  const auto operands = collect_operands(schema, *stack);
  const auto device = common_device(operands, name);
  bool is_floating = false;
  for (const auto& operand : operands)
    is_floating |= is_ours(operand.tensor) && operand.tensor.is_floating_point();
  if (at::globalContext().deterministicAlgorithms() && nondeterministic_operators().count(name) &&
      (is_floating || name.find("cumsum") == std::string::npos))
    at::globalContext().alertNotDeterministic(name);
  const int index = device ? device->index() : current_device;
  const c10::DeviceGuard guard(Guard::device_of(index));
  int stream;
  Time time;
  {
    Lock lock(s.mutex);
    stream = current_stream(index);
    run_deferred(stream, s.time[stream]);
    time = advance(stream);
    s.counts["kernels"]++;
    if (s.kernels_to_fault >= 0 && s.kernels_to_fault-- == 0) {
      s.fault = s.next_fault;
      s.is_hanging = s.next_fault.empty();
    }
    for (const auto& [tensor, is_written] : operands)
      if (is_ours(tensor) && tensor.numel()) {
        note_access(tensor.data_ptr(), stream, time, is_written, name);
        s.kernel_bytes += static_cast<int64_t>(tensor.nbytes());
      }
  }
  try {
    const DeviceGenerator generator(op, index);
    KernelScope kernel;
    at::native::cpu_fallback(op, stack);
  } catch (const c10::IndexError&) {  // on a card, an assertion in a kernel fails
    s.fault = "CUDA error: device-side assert triggered";
    raise_if_broken();
  }
  Lock lock(s.mutex);
  const bool has_out = schema.is_mutable() && name.find("out") != std::string::npos;
  for (size_t result = stack->size() - schema.returns().size(); result < stack->size(); ++result) {
    const auto& value = (*stack)[result];
    if (value.isTensor() && value.toTensor().defined() && is_ours(value.toTensor()) &&
        value.toTensor().numel()) {
      note_access(value.toTensor().data_ptr(), stream, time, true, name);
      if (!has_out) s.kernel_bytes += static_cast<int64_t>(value.toTensor().nbytes());
    }
  }
}

// Convolutions have no fallback: torch requires that a device implements them.

void begin_kernel(std::initializer_list<at::Tensor> reads, const char* operation) {
  raise_if_broken();
  Lock lock(state().mutex);
  const int stream = current_stream(reads.begin()->device().index());
  run_deferred(stream, state().time[stream]);
  const Time time = advance(stream);
  for (const auto& tensor : reads)
    if (tensor.defined()) note_access(tensor.data_ptr(), stream, time, false, operation);
}

at::Tensor to_device(const at::Tensor& host, c10::Device device) {
  if (!host.defined()) return host;
  auto result = at::empty(host.sizes(), host.options().device(device));
  KernelScope kernel;
  on_host(result).copy_(host);
  return result;
}

std::optional<at::Tensor> on_host(const std::optional<at::Tensor>& tensor) {
  if (!tensor || !tensor->defined()) return std::nullopt;
  return is_ours(*tensor) ? on_host(*tensor) : *tensor;
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
                       c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                       c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  const c10::DeviceGuard guard(input.device());
  begin_kernel({input, weight}, "convolution");
  return to_device(at::convolution_symint(on_host(input), on_host(weight), on_host(bias), stride,
                                          padding, dilation, transposed, output_padding, groups),
                   input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight,
    c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
    bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups,
    std::array<bool, 3> wanted) {
  const c10::DeviceGuard guard(input.device());
  begin_kernel({gradient, input, weight}, "convolution_backward");
  const std::vector<c10::SymInt> bias{transposed ? weight.sym_size(1) * groups
                                                 : weight.sym_size(0)};
  const auto [of_input, of_weight, of_bias] = at::convolution_backward_symint(
      on_host(gradient), on_host(input), on_host(weight), c10::SymIntArrayRef(bias), stride,
      padding, dilation, transposed, output_padding, groups, wanted);
  return {to_device(of_input, input.device()), to_device(of_weight, input.device()),
          to_device(of_bias, input.device())};
}

// CUDA's histc accepts integers, the CPU's does not.
at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& min,
                 const at::Scalar& max) {
  const c10::DeviceGuard guard(self.device());
  begin_kernel({self}, "histc");
  const auto counts = at::histc(on_host(self).to(at::kFloat), bins, min, max);
  return to_device(counts.to(self.scalar_type()), self.device());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("histc", histc);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("resize_", resize);
  m.impl("view", view);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("set_.source_Tensor", set_to_tensor);
  m.impl("set_.source_Storage", set_to_storage);
  m.impl("set_.source_Storage_storage_offset", set_to_storage_part);
  m.impl("record_stream", record_stream);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FULL_PRECISION)
}

// Functions for the tests; see __init__.py.

std::vector<std::string> take_reports() {
  Lock lock(state().mutex);
  return std::exchange(state().reports, {});
}

c10::Dict<std::string, int64_t> take_counts() {
  Lock lock(state().mutex);
  c10::Dict<std::string, int64_t> counts;
  for (const auto& [name, count] : std::exchange(state().counts, {})) counts.insert(name, count);
  return counts;
}

TORCH_LIBRARY(standin, m) {
  m.def("take_reports() -> str[]", take_reports);
  m.def("take_counts() -> Dict(str, int)", take_counts);
  m.def("take_kernel_bytes() -> int", []() {
    Lock lock(state().mutex);
    return std::exchange(state().kernel_bytes, 0);
  });
  m.def("take_touched() -> str[]", []() {
    Lock lock(state().mutex);
    std::vector<std::string> lines;
    for (const auto& [device, thread] : std::exchange(state().touched, {}))
      lines.push_back("standin:" + std::to_string(device) + " thread " + std::to_string(thread));
    return lines;
  });
  m.def("used_bytes(int device) -> int", [](int64_t device) {
    Lock lock(state().mutex);
    return static_cast<int64_t>(state().used_bytes[device]);
  });
  m.def("peak_bytes(int device) -> int", [](int64_t device) {
    Lock lock(state().mutex);
    return static_cast<int64_t>(std::exchange(state().peak_bytes[device],
                                              state().used_bytes[device]));
  });
  m.def("set_limit(int bytes) -> ()", [](int64_t bytes) {
    Lock lock(state().mutex);
    state().limit_bytes = bytes < 0 ? SIZE_MAX : static_cast<size_t>(bytes);
  });
  m.def("set_fault(str text) -> ()", [](std::string text) {
    Lock lock(state().mutex);
    state().fault = std::move(text);
  });
  m.def("set_fault_after(int kernels, str text) -> ()", [](int64_t kernels, std::string text) {
    Lock lock(state().mutex);
    state().kernels_to_fault = kernels;
    state().next_fault = std::move(text);
  });
  m.def("set_hanging(bool on) -> ()", [](bool on) { state().is_hanging = on; });
  m.def("set_float64(bool on) -> ()", [](bool on) { state().has_float64 = on; });
  m.def("seed(int seed) -> ()", [](int64_t seed) {
    Lock lock(state().mutex);
    for (auto& generator : state().generators)
      generator.set_current_seed(static_cast<uint64_t>(seed));
  });
  m.def("rng_state(int device) -> Tensor",
        [](int64_t device) { return state().generators[device].get_state(); });
  m.def("set_rng_state(int device, Tensor state) -> ()",
        [](int64_t device, const at::Tensor& saved) { state().generators[device].set_state(saved); });
  m.def("set_device(int device) -> ()",
        [](int64_t device) { Guard().setDevice(Guard::device_of(static_cast<int>(device))); });
  m.def("current_device() -> int", []() { return static_cast<int64_t>(current_device); });
  m.def("synchronize(int device) -> ()", [](int64_t device) {
    Guard().synchronizeDevice(static_cast<c10::DeviceIndex>(device));
  });
}

const bool is_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace
