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
#include "transport/ucx/ucx_version.h"
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

absl::Status DeviceLinksBuilt() { return CheckLoadedUcx(); }

namespace {

struct LinksState {
  ResolvePeer resolve;
  absl::Duration patience;
  ucp_context_h context = nullptr;
  ucp_worker_h worker = nullptr;
  std::string address;
  std::map<uint64_t, bool*> greeted;  // by token of a link
  uint64_t next_token = 1;

  ~LinksState() {
    if (worker != nullptr) ucp_worker_destroy(worker);
    if (context != nullptr) ucp_cleanup(context);
  }
  absl::Status Init();
};

class UcxDeviceLink final : public DeviceLink {
 public:
  explicit UcxDeviceLink(LinksState& links) : links_(links), token_(links.next_token++) {
    links.greeted[token_] = &greeted_;
  }
  ~UcxDeviceLink() override;
  absl::Status Init(void* memory, size_t bytes);

  const std::string& offer() const override { return offer_; }
  absl::Status Accept(std::string_view offer) override;
  absl::StatusOr<bool> Progress() override;
  std::byte* peer_memory() const override { return peer_memory_; }

 private:
  enum class Stage { kOffering, kGreeting, kTouching, kListing, kThere };

  absl::StatusOr<bool> Done();  // whether pending_ is
  absl::Status Post(ucs_status_ptr_t request, const char* what);
  absl::Status Touch();
  absl::Status List();

  LinksState& links_;
  const uint64_t token_;  // of this side: what the peer's greeting names
  std::byte* memory_ = nullptr;
  size_t bytes_ = 0;
  absl::Time deadline_;
  std::string offer_;
  Stage stage_ = Stage::kOffering;
  ucp_mem_h registered_ = nullptr;
  ucp_ep_h endpoint_ = nullptr;
  ucp_rkey_h key_ = nullptr;
  void* pending_ = nullptr;  // a request of UCX
  uint64_t peer_token_ = 0, peer_address_ = 0, peer_bytes_ = 0;
  bool greeted_ = false;  // by the peer
  absl::Status broken_;
  ucp_device_remote_mem_list_h list_ = nullptr;
  std::byte* peer_memory_ = nullptr;
};

class UcxDeviceLinks final : public DeviceLinks {
 public:
  absl::StatusOr<std::unique_ptr<DeviceLink>> Link(void* memory, size_t bytes) override {
    auto link = std::make_unique<UcxDeviceLink>(state_);
    DT_RETURN_IF_ERROR(link->Init(memory, bytes));
    return std::unique_ptr<DeviceLink>(std::move(link));
  }
  LinksState& state() { return state_; }

 private:
  LinksState state_;
};

ucs_status_t OnGreeting(void* argument, const void* header, size_t length, void*, size_t, const ucp_am_recv_param_t*) {
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
absl::Status LinksState::Init() {
  // Else registering memory of cudaMalloc fails with an empty region.
  if (const ucs_status_t status = ucs_global_opts_set_value("MEMTYPE_CACHE", "n"); status != UCS_OK)
    return UcxError(status, "UCX setting MEMTYPE_CACHE");
  ucp_config_t* raw = nullptr;
  if (const ucs_status_t status = ucp_config_read(nullptr, nullptr, &raw); status != UCS_OK)
    return UcxError(status, "UCX settings");
  const std::unique_ptr<ucp_config_t, ConfigRelease> config(raw);
  // Who lives is known from elsewhere, and links of former peers that stay mapped are no sign of anything.
  for (const auto& [name, value] :
       {std::pair{"TLS", "posix,cuda_copy,cuda_ipc"}, {"MM_ERROR_HANDLING", "y"}, {"KEEPALIVE_INTERVAL", "inf"}})
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
  worker_params.thread_mode = UCS_THREAD_MODE_SERIALIZED;  // made by the main thread, used by the event loop
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

UcxDeviceLink::~UcxDeviceLink() {
  links_.greeted.erase(token_);
  if (pending_ != nullptr) ucp_request_free(pending_);
  if (list_ != nullptr) ucp_device_mem_list_release(list_);
  if (key_ != nullptr) ucp_rkey_destroy(key_);
  if (endpoint_ != nullptr) {
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    ucs_status_ptr_t request = ucp_ep_close_nbx(endpoint_, &param);
    if (UCS_PTR_IS_PTR(request)) {
      for (int i = 0; i < kClosingRounds && ucp_request_check_status(request) == UCS_INPROGRESS; ++i)
        ucp_worker_progress(links_.worker);
      ucp_request_free(request);
    }
  }
  if (registered_ != nullptr) ucp_mem_unmap(links_.context, registered_);
}

absl::Status UcxDeviceLink::Init(void* memory, size_t bytes) {
  if (bytes <= kTouched) return InvalidArgument("a link between GPUs over ", bytes, " bytes");
  memory_ = static_cast<std::byte*>(memory);
  bytes_ = bytes;
  ucp_mem_map_params_t map{};
  map.field_mask =
      UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
  map.address = memory;
  map.length = bytes;
  map.memory_type = UCS_MEMORY_TYPE_CUDA;
  ucp_context_h context = links_.context;
  if (const ucs_status_t status = ucp_mem_map(context, &map, &registered_); status != UCS_OK)
    return UcxError(status, absl::StrCat("UCX cannot register ", bytes, " bytes of GPU memory"));
  void* key = nullptr;
  size_t key_bytes = 0;
  if (const ucs_status_t status = ucp_rkey_pack(context, registered_, &key, &key_bytes); status != UCS_OK)
    return UcxError(status, "UCX key of GPU memory");
  Put(offer_, Bytes(kOfferMagic));
  Put(offer_, BuildOfUcx());
  Put(offer_, HostIdentity());
  Put(offer_, Bytes(token_));
  Put(offer_, Bytes(reinterpret_cast<uint64_t>(memory)));
  Put(offer_, Bytes(static_cast<uint64_t>(bytes)));
  Put(offer_, links_.address);
  Put(offer_, {static_cast<const char*>(key), key_bytes});
  ucp_rkey_buffer_release(key);
  return absl::OkStatus();
}

absl::Status UcxDeviceLink::Post(ucs_status_ptr_t request, const char* what) {
  if (UCS_PTR_IS_ERR(request)) return UcxError(UCS_PTR_STATUS(request), what);
  pending_ = request;  // null: done at once
  return absl::OkStatus();
}

absl::StatusOr<bool> UcxDeviceLink::Done() {
  if (pending_ == nullptr) return true;
  const ucs_status_t status = ucp_request_check_status(pending_);
  if (status == UCS_INPROGRESS) return false;
  ucp_request_free(std::exchange(pending_, nullptr));
  if (status != UCS_OK) return UcxError(status, "the link between two GPUs");
  return true;
}

absl::Status UcxDeviceLink::Accept(std::string_view offer) {
  std::string_view rest = offer, version, host, address, key;
  uint32_t magic = 0;
  const bool read = offer.size() <= kMostOfferBytes && TakeValue(rest, magic) && magic == kOfferMagic &&
                    Take(rest, version) && Take(rest, host) && TakeValue(rest, peer_token_) &&
                    TakeValue(rest, peer_address_) && TakeValue(rest, peer_bytes_) && Take(rest, address) &&
                    Take(rest, key) && rest.empty() && peer_bytes_ > kTouched && stage_ == Stage::kOffering;
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
  params.err_handler = {OnEndpointError, &broken_};
  if (const ucs_status_t status = ucp_ep_create(links_.worker, &params, &endpoint_); status != UCS_OK)
    return UcxError(status, "UCX endpoint between GPUs");
  if (const ucs_status_t status = ucp_ep_rkey_unpack(endpoint_, key_copy.data(), &key_); status != UCS_OK)
    return UcxError(status, "UCX key of the peer's GPU memory");
  // The active-message lane must have carried something before device lists can be made.
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  DT_RETURN_IF_ERROR(
      Post(ucp_am_send_nbx(endpoint_, kGreetingId, &peer_token_, sizeof(peer_token_), nullptr, 0, &param), "greeting"));
  stage_ = Stage::kGreeting;
  deadline_ = absl::Now() + links_.patience;
  return absl::OkStatus();
}

absl::Status UcxDeviceLink::List() {
  ucp_device_mem_list_elem_t element{};
  element.field_mask = UCP_DEVICE_MEM_LIST_ELEM_FIELD_RKEY | UCP_DEVICE_MEM_LIST_ELEM_FIELD_REMOTE_ADDR |
                       UCP_DEVICE_MEM_LIST_ELEM_FIELD_EP;
  element.ep = endpoint_;
  element.rkey = key_;
  element.remote_addr = peer_address_;
  ucp_device_mem_list_params_t params{};
  params.field_mask = UCP_DEVICE_MEM_LIST_PARAMS_FIELD_ELEMENTS | UCP_DEVICE_MEM_LIST_PARAMS_FIELD_ELEMENT_SIZE |
                      UCP_DEVICE_MEM_LIST_PARAMS_FIELD_NUM_ELEMENTS | UCP_DEVICE_MEM_LIST_PARAMS_FIELD_WORKER;
  params.element_size = sizeof(element);
  params.num_elements = 1;
  params.worker = links_.worker;
  params.elements = &element;
  const ucs_status_t status = ucp_device_remote_mem_list_create(&params, &list_);
  if (status == UCS_ERR_NOT_CONNECTED) return absl::OkStatus();  // not yet
  if (status != UCS_OK) return UcxError(status, "UCX's device API");
  DT_ASSIGN_OR_RETURN(void* const pointer, links_.resolve(list_, 0));
  peer_memory_ = static_cast<std::byte*>(pointer);
  stage_ = Stage::kThere;
  return absl::OkStatus();
}

absl::Status UcxDeviceLink::Touch() {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.memory_type = UCS_MEMORY_TYPE_CUDA;
  const ucs_status_ptr_t put = ucp_put_nbx(endpoint_, memory_ + bytes_ - kTouched, kTouched / 2,
                                           peer_address_ + peer_bytes_ - kTouched, key_, &param);
  if (UCS_PTR_IS_ERR(put)) return UcxError(UCS_PTR_STATUS(put), "a first store into the peer's GPU memory");
  if (put != nullptr) ucp_request_free(put);  // the flush waits for it
  ucp_request_param_t flush{};
  stage_ = Stage::kTouching;
  return Post(ucp_ep_flush_nbx(endpoint_, &flush), "a first store into the peer's GPU memory");
}

absl::StatusOr<bool> UcxDeviceLink::Progress() {
  if (stage_ == Stage::kOffering) return false;
  for (int i = 0; i < kRounds; ++i) ucp_worker_progress(links_.worker);
  if (stage_ == Stage::kThere) return true;
  DT_RETURN_IF_ERROR(broken_);
  DT_ASSIGN_OR_RETURN(const bool done, Done());
  if (done && stage_ == Stage::kGreeting && greeted_) {
    DT_RETURN_IF_ERROR(Touch());
  } else if (done && stage_ == Stage::kTouching) {
    stage_ = Stage::kListing;
  } else if (stage_ == Stage::kListing) {
    DT_RETURN_IF_ERROR(List());
  }
  if (stage_ != Stage::kThere && absl::Now() > deadline_)
    return absl::DeadlineExceededError(
        absl::StrCat("no link between the two GPUs after ", absl::FormatDuration(links_.patience)));
  return stage_ == Stage::kThere;
}

absl::StatusOr<std::unique_ptr<DeviceLinks>> MakeDeviceLinks(ResolvePeer resolve, absl::Duration patience) {
  auto links = std::make_unique<UcxDeviceLinks>();
  links->state().resolve = std::move(resolve);
  links->state().patience = patience;
  DT_RETURN_IF_ERROR(links->state().Init());
  return std::unique_ptr<DeviceLinks>(std::move(links));
}

}  // namespace dovetail::transport::ucx
