#include "transport/ucx/device_link.h"

#include <ucp/api/device/ucp_host.h>
#include <ucp/api/ucp.h>
#include <ucs/config/global_opts.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <utility>

#include "absl/time/clock.h"
#include "transport/ucx/ucx_worker.h"

namespace dovetail::transport::ucx {
namespace {

constexpr unsigned kGreetingId = 1;
constexpr uint32_t kOfferMagic = 0x4c444344;  // "DCDL"
constexpr size_t kMostOfferBytes = 64 << 10;
constexpr int kClosingRounds = 10000;
constexpr int kRounds = 16;  // of a call of Progress

// Memory of another host, or of another namespace of this one, cannot be opened.
std::string HostIdentity() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  std::getline(file, boot);
  char space[64] = {};
  const ssize_t length = readlink("/proc/self/ns/pid", space, sizeof(space) - 1);
  return boot + " " + std::string(space, std::max<ssize_t>(length, 0));
}

std::string BuildOfUcx() { return ucp_get_version_string(); }

// Fields of an offer: a length, then so many bytes.
void Put(std::string& to, std::string_view field) {
  const auto length = static_cast<uint32_t>(field.size());
  to.append(reinterpret_cast<const char*>(&length), sizeof(length));
  to.append(field);
}
template <typename T>
std::string_view Bytes(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}
bool Take(std::string_view& from, std::string_view& field) {
  uint32_t length = 0;
  if (from.size() < sizeof(length)) return false;
  std::memcpy(&length, from.data(), sizeof(length));
  from.remove_prefix(sizeof(length));
  if (from.size() < length) return false;
  field = from.substr(0, length);
  from.remove_prefix(length);
  return true;
}
template <typename T>
bool TakeValue(std::string_view& from, T& value) {
  std::string_view field;
  if (!Take(from, field) || field.size() != sizeof(value)) return false;
  std::memcpy(&value, field.data(), sizeof(value));
  return true;
}

struct ConfigRelease {
  void operator()(ucp_config_t* config) const { ucp_config_release(config); }
};

}  // namespace

absl::Status DeviceLinksBuilt() { return absl::OkStatus(); }

struct DeviceLinks::State {
  Resolve resolve;
  ucp_context_h context = nullptr;
  ucp_worker_h worker = nullptr;
  std::string address;
  std::map<uint64_t, bool*> greeted;  // by token of a link
  uint64_t next_token = 1;

  ~State() {
    if (worker != nullptr) ucp_worker_destroy(worker);
    if (context != nullptr) ucp_cleanup(context);
  }
  absl::Status Init();
};

struct DeviceLink::State {
  enum class Stage { kOffering, kGreeting, kTouching, kListing, kThere };

  DeviceLinks::State* links = nullptr;
  std::byte* memory = nullptr;
  size_t bytes = 0;
  absl::Duration patience;
  absl::Time deadline;
  uint64_t token = 0;  // of this side: what the peer's greeting names
  std::string offer;
  Stage stage = Stage::kOffering;
  ucp_mem_h registered = nullptr;
  ucp_ep_h endpoint = nullptr;
  ucp_rkey_h key = nullptr;
  void* pending = nullptr;  // a request of UCX
  uint64_t peer_token = 0, peer_address = 0, peer_bytes = 0;
  bool greeted = false;  // by the peer
  absl::Status broken;
  ucp_device_remote_mem_list_h list = nullptr;
  std::byte* peer_memory = nullptr;

  ~State();
  absl::StatusOr<bool> Done();  // whether `pending` is
  absl::Status Post(ucs_status_ptr_t request, const char* what);
  absl::Status Touch();
  absl::Status List();
};

namespace {

ucs_status_t OnGreeting(void* argument, const void* header, size_t length, void*, size_t,
                        const ucp_am_recv_param_t*) {
  uint64_t token = 0;
  if (length != sizeof(token)) return UCS_OK;
  std::memcpy(&token, header, sizeof(token));
  const auto& greeted = *static_cast<std::map<uint64_t, bool*>*>(argument);
  if (const auto it = greeted.find(token); it != greeted.end()) *it->second = true;
  return UCS_OK;
}

void OnEndpointError(void* argument, ucp_ep_h, ucs_status_t status) {
  *static_cast<absl::Status*>(argument) = UcxError(status, "the link between two GPUs broke");
}

}  // namespace

// What is set here is what made GPU memory work between processes on UCX 1.22.
absl::Status DeviceLinks::State::Init() {
  // Else registering memory of cudaMalloc fails with an empty region.
  if (const ucs_status_t status = ucs_global_opts_set_value("MEMTYPE_CACHE", "n"); status != UCS_OK)
    return UcxError(status, "UCX setting MEMTYPE_CACHE");
  ucp_config_t* raw = nullptr;
  if (const ucs_status_t status = ucp_config_read(nullptr, nullptr, &raw); status != UCS_OK)
    return UcxError(status, "UCX settings");
  const std::unique_ptr<ucp_config_t, ConfigRelease> config(raw);
  for (const auto& [name, value] : {std::pair{"TLS", "posix,cuda_copy,cuda_ipc"}, {"MM_ERROR_HANDLING", "y"}})
    if (const ucs_status_t status = ucp_config_modify(raw, name, value); status != UCS_OK)
      return UcxError(status, absl::StrCat("UCX setting ", name, "=", value));
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_RMA | UCP_FEATURE_AMO64 | UCP_FEATURE_AM | UCP_FEATURE_DEVICE;
  if (const ucs_status_t status = ucp_init(&params, raw, &context); status != UCS_OK)
    return UcxError(status, "UCX offers no lane between GPUs here (cuda_ipc)");
  ucp_context_attr_t attributes{};
  attributes.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
  if (ucp_context_query(context, &attributes) != UCS_OK || (attributes.memory_types >> UCS_MEMORY_TYPE_CUDA & 1) == 0)
    return FailedPrecondition("UCX offers no lane between GPUs here (cuda_ipc): it finds no NVIDIA driver or GPU");
  ucp_worker_params_t worker_params{};
  worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker_params.thread_mode = UCS_THREAD_MODE_SINGLE;
  if (const ucs_status_t status = ucp_worker_create(context, &worker_params, &worker); status != UCS_OK)
    return UcxError(status, "UCX worker between GPUs");
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kGreetingId;
  handler.cb = OnGreeting;
  handler.arg = &greeted;
  if (const ucs_status_t status = ucp_worker_set_am_recv_handler(worker, &handler); status != UCS_OK)
    return UcxError(status, "UCX handler");
  ucp_address_t* own = nullptr;
  size_t length = 0;
  if (const ucs_status_t status = ucp_worker_get_address(worker, &own, &length); status != UCS_OK)
    return UcxError(status, "UCX address");
  address.assign(reinterpret_cast<const char*>(own), length);
  ucp_worker_release_address(worker, own);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<DeviceLinks>> DeviceLinks::Create(Resolve resolve) {
  auto state = std::make_unique<State>();
  state->resolve = std::move(resolve);
  DT_RETURN_IF_ERROR(state->Init());
  std::unique_ptr<DeviceLinks> links(new DeviceLinks(std::move(state)));
  return links;
}

DeviceLinks::DeviceLinks(std::unique_ptr<State> state) : state_(std::move(state)) {}
DeviceLinks::~DeviceLinks() = default;

DeviceLink::DeviceLink(std::unique_ptr<State> state) : state_(std::move(state)) {}
DeviceLink::~DeviceLink() = default;

DeviceLink::State::~State() {
  links->greeted.erase(token);
  if (pending != nullptr) ucp_request_free(pending);
  if (list != nullptr) ucp_device_mem_list_release(list);
  if (key != nullptr) ucp_rkey_destroy(key);
  if (endpoint != nullptr) {
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    ucs_status_ptr_t request = ucp_ep_close_nbx(endpoint, &param);
    if (UCS_PTR_IS_PTR(request)) {
      for (int i = 0; i < kClosingRounds && ucp_request_check_status(request) == UCS_INPROGRESS; ++i)
        ucp_worker_progress(links->worker);
      ucp_request_free(request);
    }
  }
  if (registered != nullptr) ucp_mem_unmap(links->context, registered);
}

absl::StatusOr<std::unique_ptr<DeviceLink>> DeviceLink::Create(DeviceLinks& links, void* memory, size_t bytes,
                                                               absl::Duration patience) {
  if (bytes <= kTouched) return InvalidArgument("a link between GPUs over ", bytes, " bytes");
  auto state = std::make_unique<State>();
  state->links = links.state_.get();
  state->memory = static_cast<std::byte*>(memory);
  state->bytes = bytes;
  state->patience = patience;
  state->token = links.state_->next_token++;
  links.state_->greeted[state->token] = &state->greeted;
  ucp_mem_map_params_t map{};
  map.field_mask =
      UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
  map.address = memory;
  map.length = bytes;
  map.memory_type = UCS_MEMORY_TYPE_CUDA;
  ucp_context_h context = state->links->context;
  if (const ucs_status_t status = ucp_mem_map(context, &map, &state->registered); status != UCS_OK)
    return UcxError(status, absl::StrCat("UCX cannot register ", bytes, " bytes of GPU memory"));
  void* key = nullptr;
  size_t key_bytes = 0;
  if (const ucs_status_t status = ucp_rkey_pack(context, state->registered, &key, &key_bytes); status != UCS_OK)
    return UcxError(status, "UCX key of GPU memory");
  Put(state->offer, Bytes(kOfferMagic));
  Put(state->offer, BuildOfUcx());
  Put(state->offer, HostIdentity());
  Put(state->offer, Bytes(state->token));
  Put(state->offer, Bytes(reinterpret_cast<uint64_t>(memory)));
  Put(state->offer, Bytes(static_cast<uint64_t>(bytes)));
  Put(state->offer, state->links->address);
  Put(state->offer, {static_cast<const char*>(key), key_bytes});
  ucp_rkey_buffer_release(key);
  return std::unique_ptr<DeviceLink>(new DeviceLink(std::move(state)));
}

const std::string& DeviceLink::offer() const { return state_->offer; }
std::byte* DeviceLink::peer_memory() const { return state_->peer_memory; }
size_t DeviceLink::peer_bytes() const { return state_->peer_bytes - kTouched; }

absl::Status DeviceLink::State::Post(ucs_status_ptr_t request, const char* what) {
  if (UCS_PTR_IS_ERR(request)) return UcxError(UCS_PTR_STATUS(request), what);
  pending = request;  // null: done at once
  return absl::OkStatus();
}

absl::StatusOr<bool> DeviceLink::State::Done() {
  if (pending == nullptr) return true;
  const ucs_status_t status = ucp_request_check_status(pending);
  if (status == UCS_INPROGRESS) return false;
  ucp_request_free(std::exchange(pending, nullptr));
  if (status != UCS_OK) return UcxError(status, "the link between two GPUs");
  return true;
}

absl::Status DeviceLink::Accept(std::string_view offer) {
  State& s = *state_;
  std::string_view rest = offer, version, host, address, key;
  uint32_t magic = 0;
  const bool read = offer.size() <= kMostOfferBytes && TakeValue(rest, magic) && magic == kOfferMagic &&
                    Take(rest, version) && Take(rest, host) && TakeValue(rest, s.peer_token) &&
                    TakeValue(rest, s.peer_address) && TakeValue(rest, s.peer_bytes) && Take(rest, address) &&
                    Take(rest, key) && rest.empty() && s.peer_bytes > kTouched && s.stage == State::Stage::kOffering;
  if (!read) return InvalidArgument("that is no offer of a link between GPUs");
  if (version != BuildOfUcx())
    return FailedPrecondition("the peer runs UCX ", std::string(version), ", this process ", BuildOfUcx(),
                              "; install the same release of Dovetail on both");
  if (host != HostIdentity())
    return FailedPrecondition("the peer's GPU is of another host or PID namespace; UCX's cuda_ipc lane needs one");
  const std::string address_copy(address), key_copy(key);  // UCX wants them aligned
  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(address_copy.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;  // else device lists stay "not connected"
  params.err_handler = {OnEndpointError, &s.broken};
  if (const ucs_status_t status = ucp_ep_create(s.links->worker, &params, &s.endpoint); status != UCS_OK)
    return UcxError(status, "UCX endpoint between GPUs");
  if (const ucs_status_t status = ucp_ep_rkey_unpack(s.endpoint, key_copy.data(), &s.key); status != UCS_OK)
    return UcxError(status, "UCX key of the peer's GPU memory");
  // The active-message lane must have carried something before device lists can be made.
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  DT_RETURN_IF_ERROR(s.Post(
      ucp_am_send_nbx(s.endpoint, kGreetingId, &s.peer_token, sizeof(s.peer_token), nullptr, 0, &param), "greeting"));
  s.stage = State::Stage::kGreeting;
  s.deadline = absl::Now() + s.patience;
  return absl::OkStatus();
}

absl::Status DeviceLink::State::List() {
  ucp_device_mem_list_elem_t element{};
  element.field_mask = UCP_DEVICE_MEM_LIST_ELEM_FIELD_RKEY | UCP_DEVICE_MEM_LIST_ELEM_FIELD_REMOTE_ADDR |
                       UCP_DEVICE_MEM_LIST_ELEM_FIELD_EP;
  element.ep = endpoint;
  element.rkey = key;
  element.remote_addr = peer_address;
  ucp_device_mem_list_params_t params{};
  params.field_mask = UCP_DEVICE_MEM_LIST_PARAMS_FIELD_ELEMENTS | UCP_DEVICE_MEM_LIST_PARAMS_FIELD_ELEMENT_SIZE |
                      UCP_DEVICE_MEM_LIST_PARAMS_FIELD_NUM_ELEMENTS | UCP_DEVICE_MEM_LIST_PARAMS_FIELD_WORKER;
  params.element_size = sizeof(element);
  params.num_elements = 1;
  params.worker = links->worker;
  params.elements = &element;
  const ucs_status_t status = ucp_device_remote_mem_list_create(&params, &list);
  if (status == UCS_ERR_NOT_CONNECTED) return absl::OkStatus();  // not yet
  if (status != UCS_OK) return UcxError(status, "UCX's device API");
  DT_ASSIGN_OR_RETURN(void* const pointer, links->resolve(list, 0));
  peer_memory = static_cast<std::byte*>(pointer);
  stage = Stage::kThere;
  return absl::OkStatus();
}

absl::Status DeviceLink::State::Touch() {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.memory_type = UCS_MEMORY_TYPE_CUDA;
  const ucs_status_ptr_t put = ucp_put_nbx(endpoint, memory + bytes - kTouched, kTouched / 2,
                                           peer_address + peer_bytes - kTouched, key, &param);
  if (UCS_PTR_IS_ERR(put)) return UcxError(UCS_PTR_STATUS(put), "a first store into the peer's GPU memory");
  if (put != nullptr) ucp_request_free(put);  // the flush waits for it
  ucp_request_param_t flush{};
  stage = Stage::kTouching;
  return Post(ucp_ep_flush_nbx(endpoint, &flush), "a first store into the peer's GPU memory");
}

absl::StatusOr<bool> DeviceLink::Progress() {
  State& s = *state_;
  if (s.stage == State::Stage::kOffering) return false;
  for (int i = 0; i < kRounds; ++i) ucp_worker_progress(s.links->worker);
  if (s.stage == State::Stage::kThere) return true;
  DT_RETURN_IF_ERROR(s.broken);
  DT_ASSIGN_OR_RETURN(const bool done, s.Done());
  if (done && s.stage == State::Stage::kGreeting && s.greeted) {
    DT_RETURN_IF_ERROR(s.Touch());
  } else if (done && s.stage == State::Stage::kTouching) {
    s.stage = State::Stage::kListing;
  } else if (s.stage == State::Stage::kListing) {
    DT_RETURN_IF_ERROR(s.List());
  }
  if (s.stage != State::Stage::kThere && absl::Now() > s.deadline)
    return absl::DeadlineExceededError(
        absl::StrCat("no link between the two GPUs after ", absl::FormatDuration(s.patience)));
  return s.stage == State::Stage::kThere;
}

}  // namespace dovetail::transport::ucx
