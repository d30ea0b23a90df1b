#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "base/host_process.h"
#include "base/ids.h"
#include "base/status.h"
#include "control/messages.h"
#include "scheduler/bad_links.h"

namespace dovetail::scheduler {

// Whether compute workers are linked with each other, so that prefill groups can exchange directly.
enum class ComputeLinks : uint8_t {
  kNone,
  kWherePossible,  // groups of those that do not reach each other exchange by way of the attention workers
  kRequired,       // of two that do not reach each other only one serves
};

struct MembershipOptions {
  absl::Duration lease = absl::Milliseconds(400);
  absl::Duration suspect_lease = absl::Milliseconds(200);  // of a member whose part of a step is overdue
  absl::Duration heartbeat = absl::Milliseconds(50);
  absl::Duration silence = absl::Milliseconds(500);    // on the data plane, after which nodes tell of each other
  absl::Duration settling = absl::Milliseconds(250);   // between the first report of a bad link and its judgement
  absl::Duration longest_lateness = absl::Seconds(2);  // of a member from which heartbeats come and that is not at work
  absl::Duration longest_turn = absl::Seconds(60);     // of a member's event loop
  absl::Duration join_grace = absl::Seconds(2);        // from Join to the first report
  absl::Duration upload_grace = absl::Seconds(60);     // the same of a compute worker: model files travel meanwhile
  // Leases of members that get no time from a busy machine are longer, by no more than this.
  absl::Duration longest_starvation = absl::Seconds(10);
  absl::Duration lateness_half_life = absl::Seconds(10);  // after which late heartbeats count half
  int max_members = 128;
  bool unlike_workers = false;  // take compute workers whose arithmetic is not the cluster's
  ComputeLinks compute_links = ComputeLinks::kNone;
  std::string data_plane_version;  // the scheduler's own
  std::string data_plane_address;
  Epoch epoch;  // of the scheduler's port
  uint64_t cluster = 0;
  HostProcess process;  // the scheduler's own
  int micro_batches = 1;
  int max_step_tokens = 512;
};

// A member goes through these in order; what it is told and when depends on them.
enum class MemberState : uint8_t {
  kJoining,     // granted; its stream has not begun
  kWaiting,     // no model is there yet to be configured for
  kPreparing,   // configured; allocates its KV blocks
  kConnecting,  // ready; peers connect to it and it to them
  kServing,     // the scheduler core may use it
  kDraining,    // serving what it has
};
const char* NameOf(MemberState state);

// The type in which attention workers keep K and V, as --kv-cache-dtype has it; empty: the model keeps none. What a GPU
// rounds to by itself is not in it.
// Threads: pure.
std::string KvCacheDtypeOf(const control::ModelSummary& model);

struct Member {
  WorkerId worker;
  Epoch epoch;
  control::JoinRequest request;
  MemberState state = MemberState::kJoining;
  absl::Time joined, heard;
  absl::Time back_since = absl::InfinitePast();  // when it was last heard after a pause
  absl::Time at_work = absl::InfinitePast();     // when it last told of a long turn of its loop
  bool suspected = false;                        // since it was last heard
  absl::Duration lateness;                       // of its heartbeats, lately, beyond a heartbeat's time
  absl::Time excused = absl::InfinitePast();     // until then its silence is no sign of its end
  absl::Time late_since, late_at;                // first and last report of a step that waits for it
  std::vector<absl::Time> lost;  // when attention workers had to go for their links with this compute worker
  control::Heartbeat last;
  control::Ready ready;                                     // once it is configured
  std::set<NodeId> known;                                   // peers that it has connected to
  std::vector<std::pair<uint64_t, std::set<NodeId>>> sent;  // lists of peers not yet applied, by version
  std::vector<control::Peer> last_sent;
};

inline bool IsUp(const Member& member) { return member.state >= MemberState::kConnecting; }
inline bool IsServing(const Member& member) { return member.state >= MemberState::kServing; }

inline constexpr NodeId kSchedulerNode(0);
inline constexpr char kDrained[] = "drained";  // the one end after which a worker does not join again

// What the shell must do, in order.
struct SendConfiguration {
  WorkerId worker;
};
struct SendPeers {
  WorkerId worker;
  control::Peers peers;
};
struct ConnectNode {  // the scheduler's own port; if it cannot, Refuse(worker, why)
  WorkerId worker;
  NodeId node;
  Epoch epoch;
  std::string address;
};
struct DisconnectNode {
  NodeId node;
};
struct BeginServing {  // the scheduler core may use it
  WorkerId worker;
};
struct DrainMember {  // the core places nothing new on it; call Drained() once it has nothing left
  WorkerId worker;
};
struct EndServing {  // the core must not use it any more; sent only after BeginServing
  WorkerId worker;
  control::Role role;
  Epoch epoch;
  std::string why;
};
struct LinkComputeWorkers {  // two that serve reach each other, or do no longer
  WorkerId one, other;
  bool linked = true;
  std::string why;  // not
};
struct EndSession {  // close its stream; `dismissed`: tell it that it is out
  WorkerId worker;
  bool dismissed = false;
  std::string why;
};
using MemberAction = std::variant<SendConfiguration, SendPeers, ConnectNode, DisconnectNode, BeginServing, DrainMember,
                                  EndServing, LinkComputeWorkers, EndSession>;

// The members of the cluster, as a value: events in, actions out, `now` is an argument. A member is used only when it
// and all members with which it must exchange frames have reported that they are connected, so no frame is sent to a
// member that would drop it. Worker ids, node ids and epochs are never used twice.
//
// Threads: thread-compatible; deterministic; no clock, socket or gRPC.
class ControlMembers {
 public:
  explicit ControlMembers(MembershipOptions options) : options_(std::move(options)) {}

  // kFailedPrecondition: versions, models or the arithmetic of compute workers differ; kAlreadyExists: the node or the
  // name is taken; kResourceExhausted: full; kAborted: the process was drained.
  absl::StatusOr<control::JoinReply> Join(const control::JoinRequest& request, absl::Time now);

  // Its stream began. kNotFound: no such member, or a former incarnation of it.
  absl::Status Attend(WorkerId worker, Epoch epoch, absl::Time now, std::vector<MemberAction>& actions);
  void Heard(WorkerId worker, control::Heartbeat heartbeat, absl::Time now);
  // It is configured. kInvalidArgument: it says that it has more KV than it joined with.
  absl::Status Ready(WorkerId worker, const control::Ready& ready, absl::Time now, std::vector<MemberAction>& actions);
  absl::Status Applied(WorkerId worker, const control::Applied& applied, absl::Time now,
                       std::vector<MemberAction>& actions);

  // What `reporter` says about a peer on the data plane. A link that is broken or silent, or never came up, is judged
  // by Expire() once both ends were heard here some time after the first report: if one has ended, that explains the
  // link and no other member is affected. One of two ends that live must join anew: of two of a role the one that does
  // not serve yet; of a compute worker and an attention worker that another compute worker reaches, the one with more
  // bad links, or else with fewer that work; of others the attention worker, or a compute worker that lost several of
  // them. A silent peer whose loop is at work is left alone. A peer that is late or whose link broke is suspected:
  // until its next heartbeat its lease is short.
  void LinkFailed(WorkerId reporter, const control::LinkFailed& failed, absl::Time now,
                  std::vector<MemberAction>& actions);

  // The scheduler itself has heard nothing from there on the data plane since `since`.
  void Unheard(NodeId node, Epoch epoch, absl::Time since, absl::Time now, std::vector<MemberAction>& actions);

  // The membership has ended: by the member itself (stream ended, left), or since it was refused.
  void Gone(WorkerId worker, const std::string& why, std::vector<MemberAction>& actions);
  void Refuse(WorkerId worker, const std::string& why, std::vector<MemberAction>& actions);

  // Both workers of a pair (PartnerOf).
  absl::Status Drain(WorkerId worker, std::vector<MemberAction>& actions);
  // kAborted names another worker of its role that drains.
  absl::Status MayDrainAlone(WorkerId worker) const;
  void Drained(WorkerId worker, std::vector<MemberAction>& actions);

  // Members whose lease has run out, to be asked about before Expire(). A member whose process runs on the
  // scheduler's host gets no time there: Excuse() gives it a heartbeat's time more, longest_starvation in all. True:
  // the first time since it was heard.
  std::vector<WorkerId> Overdue(absl::Time now) const;
  bool Excuse(WorkerId worker, absl::Time now);

  // Ends members whose lease has run out, and judges bad links. To be called after every event, too.
  void Expire(absl::Time now, std::vector<MemberAction>& actions);
  absl::Time NextDeadline() const;
  // The scheduler heard no member for `gap`, and no member could hear it: all deadlines move by `gap`.
  void Forgive(absl::Duration gap, absl::Time now);

  // The cluster's model: the first compute worker's. Its files may still be missing.
  const std::optional<control::ModelSummary>& model() const { return model_; }
  // Where the compute worker that brought the model computes: "cpu", "cuda:0". Empty without a model.
  const std::string& device() const { return device_; }
  // All files of the model are there: from now on members are configured for it.
  void ModelComplete(std::vector<MemberAction>& actions);
  bool model_complete() const { return model_complete_; }
  // Whether a compute worker may give other bits than the one that brought the model. KV caches keep what that one
  // computed, also when it has left.
  bool IsUnlike(const control::JoinRequest& request) const;
  // Equal numbers: members whose arithmetic is the same. 0 for that of the compute worker that brought the model, and
  // for one that does not say.
  int KindOf(const control::JoinRequest& request) const;

  const std::map<WorkerId, Member>& members() const { return members_; }
  const Member* Find(WorkerId worker) const;
  const Member* FindNode(NodeId node) const;
  // The peers that a member should be connected with but is not: their names, or "scheduler".
  std::vector<std::string> Unconnected(const Member& member) const;
  const Member* FindName(const std::string& name) const;
  // The other worker of its process: the two are a pair. Null: there is none.
  const Member* PartnerOf(const Member& member) const;

 private:
  Member* Mutable(WorkerId worker);
  bool IsCutOff(const Member& member, absl::Time now) const;
  bool LateForTooLong(Member& member, absl::Time now) const;
  void JudgeLinks(absl::Time now, std::vector<MemberAction>& actions);
  bool CanBeJudged(const BadLinks::Ends& ends, const BadLink& link, absl::Time now) const;
  bool LacksSeveral(const Member& compute, const Member& attention, absl::Time now) const;
  int WorkingLinks(const Member& member) const;
  int BadLinksOf(const Member& member) const;
  bool ServedByAnother(const Member& attention, const Member& compute) const;
  const Member& WhoMustGo(const Member& one, const Member& other, absl::Time now) const;
  void Part(const Member& one, const Member& other, const std::string& why, absl::Time now,
            std::vector<MemberAction>& actions);
  absl::Status CheckVersions(const control::JoinRequest& request) const;
  absl::Status CheckModel(const control::JoinRequest& request) const;
  absl::Status CheckArithmetic(const control::JoinRequest& request) const;
  void Configure(Member& member, std::vector<MemberAction>& actions);
  bool NeedsPeer(const Member& member, const Member& other) const;
  bool Connected(const Member& a, const Member& b) const;
  void SendPeersTo(Member& member, std::vector<MemberAction>& actions);
  void SendPeersToAll(std::vector<MemberAction>& actions);
  void ServeWhoCan(std::vector<MemberAction>& actions);
  bool MustReach(const Member& member, const Member& other) const;
  void TellLinks(std::vector<MemberAction>& actions);
  absl::Duration PatienceWith(const Member& member) const;
  absl::Time DeadlineOf(const Member& member) const;
  bool MayServe(const Member& member) const;
  void DrainOne(Member& member, std::vector<MemberAction>& actions);
  void Remove(WorkerId worker, const std::string& why, bool dismissed, std::vector<MemberAction>& actions);

  const MembershipOptions options_;
  std::map<WorkerId, Member> members_;  // iterated in a fixed order
  BadLinks bad_links_;
  std::map<BadLinks::Ends, bool> told_links_;  // of compute workers that serve, as LinkComputeWorkers said last
  std::set<NodeId> used_nodes_;                // of this and former members
  std::deque<uint64_t> drained_;               // the last processes that were told to go
  std::optional<control::ModelSummary> model_;
  // Name, arithmetic and device of the compute worker that brought it.
  std::string computed_by_, arithmetic_, device_;
  std::vector<std::string> other_arithmetics_;  // of compute workers so far, in the order in which they joined
  bool model_complete_ = false;
  uint32_t next_worker_ = 1;
  uint64_t version_ = 0;
  absl::Time away_until_ = absl::InfinitePast();  // the scheduler was, or members may still think so
};

}  // namespace dovetail::scheduler
