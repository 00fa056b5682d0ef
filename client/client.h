/* client.h - the inside of libkvclient.
 *
 *   kv_client   one per thread: a port, the nodes, what is under way
 *   kv_remote   a node, as the client sees it: its control carrier and a lane per data thread
 *   kv_lane     a data thread of a node: a channel, credits, queues of errands
 *   kv_op       what the caller began
 *   kv_errand   what an operation still has to ask of one lane: a cursor over rows or objects
 *   kv_trip     one message to a data thread and its answer; takes one of the lane's credits
 *   kv_envelope a message's memory, until the transport has let go of it
 *   kv_call     one control operation on one node
 *   kv_session  a session's handle
 *
 * An operation:
 *
 *   begin --> QUEUED --> PREPARING --------------> RUNNING ------------------> ENDED
 *             behind a    nodes connect,            errands become trips while
 *             lifecycle   the session's nodes       lanes have credits; calls
 *             operation   catch up                  go to the control carriers
 *
 * A trip:
 *
 *   taken -> built -> sent -+-> answered, its data landed ------------> released
 *                     ^     +-> no answer, or KV_BUSY: sent again with a new id
 *                     +-----+
 *   its operation ends first: an orphan.  It is never sent again and its answers are dropped;
 *   it is released when neither a send nor a landing can touch memory any more (quarantine).
 *
 * Invariants:
 *   (1) A trip that is not released holds its buffer; so does an operation that has not ended.
 *   (2) Only the latest id of a trip is answered to: what comes with another id is dropped, its
 *       data refused.  A trip is not sent again while data is landing.
 *   (3) Nothing in here waits: all that takes time is a state, moved on by kv_poll().  Only
 *       kv_wait(), kv_finish(), kv_client_wait() and kv_client_open() sleep.
 *   (4) Callbacks of carriers and transports change states; channels and carriers are closed
 *       outside of them, by kv_remotes_step().
 *
 * Threads: all of a client belongs to one thread.  Memory: kv_client_create/kv_client_close.
 */
#ifndef KV_CLIENT_CLIENT_H
#define KV_CLIENT_CLIENT_H

#include "client/control.h"
#include "client/include/kvclient.h"
#include "client/list.h"
#include "kvserver/base/clock.h"
#include "kvserver/base/pool.h"
#include "kvserver/base/random.h"
#include "kvserver/base/writers.h"
#include "kvserver/cluster/placement.h"
#include "kvserver/net/transport.h"

struct ProtobufCMessage;
struct kv_client;
struct kv_remote;
struct kv_trip;
struct kv_call;
struct kv_errand;

enum {
    KV_DETAIL_BYTES = 512,
    KV_REMOTE_THREADS_MAX = 64,   /* data threads of a node */
    KV_REMOTE_CREDITS_MAX = 256,  /* used of what hello grants, per data thread */
    KV_TRIPS_MAX = 4096,          /* messages in flight, over all nodes */
    KV_ENVELOPE_SMALL = 16 << 10, /* body of a small envelope */
    KV_ENVELOPES_LARGE_MAX = 128, /* of KV_WIRE_BODY_MAX, made when they are needed */
    KV_SENDS = 8,                 /* messages of one trip that the transport holds at most */
    KV_INLINE_WANTED = 32 << 10,  /* rows or object bytes up to this travel in the body */
    KV_OP_ROOM_KEPT = 64 << 10,   /* of an operation's room, for the next one in its place */
    KV_LIFECYCLE_LOG = 16,
    KV_RECEIPTS_MAX = 64, /* of a node: answers too large to come at once, on their way */
    KV_NOTICES = 64,
    KV_BULK_SLOWEST =
        16, /* bytes/us at which large data may move before it counts as silence */
};

/* ---- set-up ------------------------------------------------------------------------------ */

/* Opens the carrier to a node's control thread; connects nothing yet. */
typedef kv_status_t (*kv_control_open_fn)(struct kv_client *client,
                                          uint32_t node,
                                          const char *address,
                                          struct kv_control **ret_control);

struct kv_remote_setup {
    const char *address;       /* copied */
    enum kv_channel_mode mode; /* of the data channels */
    bool may_fall_back;        /* where shared memory does not work, the network will do */
};

/* All that a client takes from outside.  Zeros mean the defaults of kvclient.h. */
struct kv_client_setup {
    const struct kv_remote_setup *nodes;
    uint32_t n_nodes;
    struct kv_transport *transport; /* borrowed for the client's life */
    kv_control_open_fn open_control;
    const struct kv_clock *clock; /* borrowed for the client's life */
    uint64_t seed;                /* of ids, tokens and placement roots; 0: from the system */
    const char *name;             /* copied */
    uint32_t tenant;
    uint32_t ops_max;
    uint32_t credits;         /* at most so many of those granted; 0: all */
    uint32_t deadline_ms;     /* of operations begun with deadline 0; 0: 5000 */
    uint32_t peer_timeout_ms; /* 0: 2000 */
    uint32_t retry_ms;        /* an answer that takes so long is asked for again; 0: 1000 */
};

/* Makes a client that has connected nothing: operations connect the nodes that they need. Never
 * blocks.  KV_INVALID, KV_NO_MEMORY, or what the transport says. */
kv_status_t kv_client_create(const struct kv_client_setup *setup,
                             struct kv_client **ret_client);

/* control_message.c: control operations as messages to "loopback:HEX", HEX being the address of
 * the node's control port; a row for kv_client_setup.open_control. */
kv_status_t kv_control_message_open(struct kv_client *client,
                                    uint32_t node,
                                    const char *address,
                                    struct kv_control **ret_control);

/* ---- nodes and lanes --------------------------------------------------------------------- */

/* Most urgent first.  Each class is sure of some of a lane's credits: a class that waits in the
 * node for another one's rows cannot keep these from coming. */
enum kv_lane_class {
    KV_LANE_FETCH,
    KV_LANE_APPEND,
    KV_LANE_READ,
    KV_LANE_PUT,
    KV_LANE_CLASSES,
};

/* What a channel's events name: the first member of what the channel is for. */
struct kv_link {
    struct kv_remote *remote;
};

struct kv_lane {
    struct kv_link link;
    struct kv_channel *channel;
    struct kv_list errands[KV_LANE_CLASSES];
    uint32_t in_flight[KV_LANE_CLASSES];
    uint32_t n_in_flight;
    const struct kv_op *mark; /* the operation that made an errand for this lane last */
    uint32_t put_next;        /* the number of the next object_put */
    uint32_t put_settled;     /* all below it have ended */
    uint64_t puts_ended[KV_WIRE_PUTS_MAX / 64]; /* of those between */
};

enum kv_remote_state {
    KV_REMOTE_IDLE,
    KV_REMOTE_CONNECTING, /* hello is under way */
    KV_REMOTE_CONNECTED,
};

struct kv_remote {
    struct kv_client *client;
    uint32_t index;
    enum kv_remote_state state;
    enum kv_channel_mode mode, first_mode; /* now, and of each new try */
    bool may_fall_back;
    bool is_second_try; /* of the first connection */
    char *address;

    struct kv_control *control;
    uint32_t n_calls;    /* with the carrier */
    uint64_t control_us; /* when the carrier was last looked at */
    bool has_attached;

    struct kv_id128 client_id; /* that hello says; new for every connection */

    /* From hello; valid while CONNECTED. */
    struct kv_lane *lanes;
    uint32_t n_lanes;
    uint32_t client_index;
    struct kv_id128 client_token;
    uint32_t credits;
    uint32_t bulk_bytes_max;

    /* From the last hello. */
    struct kv_id128 node_id;
    uint32_t incarnation; /* raised when node_id changes: sessions of before are gone */
    bool has_connected;   /* ever */
    char name[KV_NAME_BYTES_MAX + 1];
    char transports[256];
    char transport[128];
    uint64_t memory_bytes;

    /* Something said that the connection is over; kv_remotes_step() ends it. */
    kv_status_t failure;
    kv_status_t last_failure; /* why it is not connected; KV_OK: it is, or was not tried */
    char failure_text[256];   /* of either; "" if there is none */

    uint64_t owed_us; /* since when an answer is owed and nothing was heard; 0: not */
    struct kv_trip *ping;
    uint32_t n_trips;     /* not released */
    uint64_t bulk_moving; /* bytes of bulk data handed to the transport by those */
    uint32_t n_receipts;  /* answers on their way */
    uint64_t requests, rows_in, rows_out, reconnects;
};

/* Begins to connect, unless it has begun or is connected. */
void kv_remote_connect(struct kv_remote *remote);

/* Notes that the connection is over; may be called from callbacks. */
void kv_remote_fail(struct kv_remote *remote, kv_status_t status, const char *why);

/* Ends what was noted, and all that was under way with it. */
void kv_remotes_step(struct kv_client *client);

/* Tells the node that the client leaves; nobody waits for the answer. */
void kv_remote_goodbye(struct kv_remote *remote);

/* Closes carriers and channels, quietly. */
void kv_remote_close(struct kv_remote *remote);

/* Whatever came from the node. */
void kv_remote_heard(struct kv_remote *remote);

/* Pings who is silent, gives up who was silent for too long. */
void kv_remotes_timers(struct kv_client *client);

/* The lane that owns a unit's slot, or an object's.  NULL: its node is not connected; an
 * operation that has nothing to do there any more may go on all the same. */
struct kv_lane *kv_lane_of_unit(struct kv_client *client, uint32_t slot);
struct kv_lane *kv_lane_of_object(struct kv_client *client, uint32_t slot);

/* The same for a unit of a session. */
struct kv_lane *
kv_session_lane(const struct kv_session *session, uint32_t layer, uint32_t head);

/* Forgets every lane's mark: an operation begins to look for its lanes. */
void kv_lanes_unmark(struct kv_client *client);

/* connection.c: turns errands into trips while there are credits. */
void kv_lanes_pump(struct kv_client *client);
void kv_lane_init(struct kv_lane *lane, struct kv_remote *remote);

/* Numbers an object_put, by which the node knows it when it is sent again (kv_wire.h).  false:
 * too many are under way behind one that has not ended. */
bool kv_lane_put_begin(struct kv_lane *lane, uint32_t *ret_number);
void kv_lane_put_end(struct kv_lane *lane, uint32_t number);

/* ---- errands ----------------------------------------------------------------------------- */

struct kv_errand {
    struct kv_errand *next; /* free */
    struct kv_list of_lane;
    struct kv_list of_op;
    struct kv_op *op;
    struct kv_lane *lane;
    /* Where it is; what the fields mean is its operation's. */
    uint32_t layer;
    uint32_t head;
    uint64_t position;
    bool alone;    /* object: only the rest of what the object at `head` needs */
    bool finished; /* nothing left to ask */
};

/* NULL: out of memory. */
struct kv_errand *kv_errand_add(struct kv_op *op, struct kv_lane *lane);
void kv_errand_free(struct kv_errand *errand);

/* ---- trips ------------------------------------------------------------------------------- */

/* One message that the transport may hold. */
struct kv_send {
    struct kv_trip *trip;
    bool busy;
    struct kv_wire_header header;
    struct kv_iov pair[2]; /* body and bulk in one message */
};

struct kv_envelope {
    struct kv_envelope *next; /* free */
    bool is_large;
    struct kv_send sends[KV_SENDS];
    uint8_t body[] __attribute__((aligned(16)));
};

struct kv_trip {
    struct kv_list of_op;
    struct kv_op *op; /* NULL: an orphan, or the library's own ping */
    struct kv_client *client;
    struct kv_remote *remote;
    struct kv_lane *lane; /* NULL: lost, and the credit with it */
    enum kv_lane_class class;
    struct kv_buffer *buffer; /* held until release; may be NULL */
    struct kv_envelope *envelope;

    /* What is asked.  The header's ids are filled when it is sent. */
    struct kv_wire_header header;
    size_t body_bytes;
    const void *bulk; /* header.bulk_bytes of it */

    /* What is expected, and where in the operation it belongs. */
    uint32_t n_rows;
    size_t bytes;       /* of rows, or of an object's piece at most */
    uint64_t position;  /* fetch: ids of the first unit before these; object: offset; query:
                           heads with their place in the caller's buffer before these */
    uint32_t item;      /* object: its number */
    size_t crcs_offset; /* in the envelope's body: room for the answer's CRCs */
    bool lands_late;    /* data is taken only when the answer's header is known */

    uint64_t id; /* of the last attempt; 0: none */
    uint64_t resend_us;
    uint64_t patience_us; /* from an attempt to the next */
    uint64_t backoff_us;  /* from KV_BUSY to the next attempt */
    bool is_live;         /* lent by the pool */
    bool is_moving;       /* its bulk counts in remote->bulk_moving */
    bool is_over;         /* nothing is expected any more */
    bool is_waiting;      /* an answer is owed */
    bool has_left;        /* once, at least */
    bool is_landing;
    bool has_reply;
    bool has_bulk;
    struct kv_wire_header reply;
    uint64_t bulk_got;
    struct kv_incoming *held; /* data that waits for the reply */
};

kv_status_t kv_trips_init(struct kv_client *client);
void kv_trips_fini(struct kv_client *client); /* the port is closed */

/* A trip of the operation (NULL: the library's) to a lane.  NULL: all are in use. */
struct kv_trip *kv_trip_take(struct kv_lane *lane, enum kv_lane_class class, struct kv_op *op);

/* Gives it an envelope with room for `bytes` of body, at most KV_WIRE_BODY_MAX.  false: there
 * is none now. */
bool kv_trip_envelope(struct kv_trip *trip, size_t bytes);

/* Sends it, or sends it again.  A failure shows later, as no answer. */
void kv_trip_send(struct kv_trip *trip);

/* Refuses an answer: KV_CORRUPT, and why. */
kv_status_t kv_reply_refuse(char *detail, size_t detail_bytes, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* What answers about units say in their headers: the first one's layer, and how many tokens are
 * committed, at least `tokens`. */
kv_status_t kv_reply_check_units(const struct kv_trip *trip,
                                 uint32_t layer,
                                 uint32_t tokens,
                                 char *detail,
                                 size_t detail_bytes);

/* A failure as a peer says it; KV_CORRUPT where it says none that exists. */
kv_status_t kv_peer_status(int32_t status);

/* A peer's text, which must not steer a terminal; cut to fit. */
void kv_peer_text(char *to, size_t to_bytes, const char *from, size_t from_bytes);

/* The same of a name that is kept, in whatever language: control characters become '?'. */
void kv_peer_name(char *name);

/* Its operation has ended: tells the node, and releases it as soon as that is safe. */
void kv_trip_abandon(struct kv_trip *trip);

/* The answer is complete and dealt with. */
void kv_trip_end(struct kv_trip *trip);

/* Sends again what has waited long enough; *next_us becomes the time of the next if earlier. */
void kv_trips_timers(struct kv_client *client, uint64_t *next_us);

/* What the client's port calls. */
extern const struct kv_port_events kv_client_events;

/* The least request id that is no trip's: control messages. */
#define KV_CONTROL_ID_BIT (UINT64_C(1) << 63)

/* control_message.c: whether a call waits for this answer, by id, op and client_token. */
bool kv_control_message_awaits(const struct kv_control *control,
                               const struct kv_wire_header *header);

/* control_message.c: an answer that came to the client's port.  Borrows all. */
void kv_control_message_reply(struct kv_control *control,
                              const struct kv_wire_header *header,
                              const uint8_t *body);
extern const struct kv_control_row kv_control_message_row;

/* After the port has closed: frees requests that the transport held. */
void kv_control_message_fini(struct kv_client *client);

/* ---- calls ------------------------------------------------------------------------------- */

/* How a control operation on one node ended.  KV_OK: `reply` is the unpacked reply, whose
 * outcome is KV_OK, lent for the call.  call->op is NULL if the operation has ended before. */
typedef void (*kv_call_done_fn)(struct kv_call *call,
                                kv_status_t status,
                                const struct ProtobufCMessage *reply,
                                const char *detail);

struct kv_call {
    struct kv_list of_client;
    struct kv_client *client;
    struct kv_remote *remote;
    struct kv_op *op;
    struct kv_session *session; /* for the handler; NULL once the handle is freed */
    kv_call_done_fn done;
    enum kv_op_id id;
    uint64_t deadline_us;
    uint64_t resend_us; /* KV_BUSY was the answer */
    uint64_t patience_us;
    bool is_out;   /* with the carrier */
    bool has_left; /* once, at least */
    size_t request_bytes;
    uint8_t request[];
};

/* Borrows `request`.  `op` and `session` may be NULL.  Nothing is called on failure. */
kv_status_t kv_call_begin(struct kv_remote *remote,
                          struct kv_op *op,
                          struct kv_session *session,
                          enum kv_op_id id,
                          const struct ProtobufCMessage *request,
                          kv_call_done_fn done);
void kv_calls_timers(struct kv_client *client, uint64_t *next_us);

/* The node is lost: ends the calls that wait for another try. */
void kv_calls_lose(struct kv_remote *remote);

/* ---- operations -------------------------------------------------------------------------- */

enum kv_op_stage {
    KV_STAGE_QUEUED,
    KV_STAGE_PREPARING,
    KV_STAGE_RUNNING,
    KV_STAGE_ENDED,
};

/* An operation of the API: one row each. */
struct kv_op_kind {
    const char *name;
    enum kv_op_id id;
    enum kv_lane_class class;
    bool is_exclusive;  /* the session's other operations wait for it, and it for them */
    bool needs_current; /* the session's nodes must have seen every lifecycle operation */
    bool is_tolerant;   /* a node that cannot be reached does not end it */

    /* The nodes it needs are ready.  Adds errands, begins calls; may end the operation. */
    void (*start)(struct kv_op *op);

    /* Instead, where a node's share does not depend on other nodes: one that it needs is ready.
     * Both or neither of these two. */
    void (*start_node)(struct kv_op *op, const struct kv_remote *remote);
    /* What it had to do on the node has come to nothing; the rest goes on. */
    void (*lost)(struct kv_op *op,
                 const struct kv_remote *remote,
                 kv_status_t status,
                 const char *why);

    /* Whether rows of this client's are under way that lead up to those of the trip: the node
     * is told that they come, and a refusal for want of them may pass.  NULL: none do. */
    bool (*awaits)(const struct kv_trip *trip);

    /* Fills a trip with what the errand asks next and moves the errand on.  KV_BUSY: no
     * envelope now, nothing happened. */
    kv_status_t (*build)(struct kv_errand *errand, struct kv_trip *trip);
    /* Where `bytes` of the answer's data go; 0: they are not what was asked for. */
    unsigned (*land)(struct kv_trip *trip, uint64_t bytes, struct kv_iov *ret_iov);
    /* An answer's header and body.  Not KV_OK: it is not what was asked for; `detail` says
     * which field has which value. */
    kv_status_t (*reply)(struct kv_trip *trip,
                         const uint8_t *body,
                         char *detail,
                         size_t detail_bytes);
    /* The answer and its data are there.  Not KV_OK: it fails its checks. */
    kv_status_t (*finish)(struct kv_trip *trip, char *detail, size_t detail_bytes);
    /* A trip failed.  NULL: so does the operation. */
    void (*failed)(struct kv_trip *trip, kv_status_t status, const char *detail);

    /* A node is beyond the generation that the operation waits for: begin anew, from PREPARING.
     * NULL: that is a failure. */
    void (*overtaken)(struct kv_op *op);
    /* It ends, however: the last look at what it holds. */
    void (*ended)(struct kv_op *op);
    /* Frees what `ended` has left for the caller. */
    void (*fini)(struct kv_op *op);
    /* What it is about, for texts: "session 1a2b, layer 3".  May be NULL. */
    void (*describe)(const struct kv_op *op,
                     const struct kv_trip *trip,
                     char *text,
                     size_t text_bytes);
};

struct kv_rows_part {
    struct kv_rows box;
    uint8_t *base;  /* of the first row */
    uint32_t *crcs; /* may be NULL; read: the caller's, else in the operation's room */
};

struct kv_fetch_part {
    uint32_t layer, head_begin, n_heads, snapshot;
    const uint32_t *ids; /* in the operation's room */
    uint8_t *base;
    uint32_t *crcs;                   /* the caller's */
    uint32_t begin[KV_HEADS_MAX + 1]; /* of each head's ids in `ids` */
};

struct kv_query_answer;
struct kv_query_part {
    struct kv_query query; /* what it points at is in the operation's room; no n_held */
    uint32_t n_heads, d_k, d_v;
    uint32_t n_candidates;
    uint32_t n_ids_min, n_ids_max; /* chosen of one head */
    uint32_t n_blocks;             /* that the candidates lie in */
    uint32_t n_scored;             /* by step 1; 0: it is left out */
    uint32_t n_reranked_max;       /* by step 2; 0: it is left out */
    float output_most, lse_most;   /* without their signs */
    size_t row_bytes;
    uint32_t n_placed;                /* heads whose rows have their place in the buffer */
    uint8_t *base;                    /* of all rows */
    struct kv_found *found;           /* (n_heads) */
    struct kv_query_answer **answers; /* (n_heads) of the message that begins at that place */
    uint32_t *held_begin;             /* (n_heads + 1) of each head's blocks in query.held */
};

struct kv_index_part {
    struct kv_index index; /* n_layers is not 0 any more */
    struct kv_indexed sum;
};

struct kv_object_state;
struct kv_objects_part {
    struct kv_object *objects; /* the caller's, for results alone */
    uint32_t n_objects;
    uint32_t first_bad; /* the first object of those that failed */
    struct kv_object_state *states;
};

struct kv_lifecycle {
    uint64_t op_id;
    enum kv_op_id kind;
    uint32_t generation; /* before */
    uint32_t tokens;
    struct kv_id128 child_id, child_token;
    uint64_t writer; /* fork: the child's; truncate: the session's own from then on */
};

struct kv_op {
    struct kv_list of_client; /* until it ends */
    struct kv_list of_session;
    struct kv_client *client;
    const struct kv_op_kind *kind;
    bool is_lent; /* by the pool */
    kv_status_t status;
    enum kv_op_stage stage;
    uint64_t begin_us, deadline_us, end_us;
    uint64_t sent_us, arrived_us;      /* its last request, when that was sent first, its last
                                          answer; 0: none yet */
    uint64_t needs[KV_NODES_MAX / 64]; /* nodes, a bit each */

    struct kv_session *session; /* NULL once ended */
    struct kv_buffer *buffer;   /* held until ended */
    struct kv_list trips;
    struct kv_list errands;
    uint32_t n_calls;
    uint32_t phase;
    bool needs_current;

    kv_status_t partial; /* the first failure that did not end it */
    const struct kv_remote *partial_remote;
    char partial_text[200];

    /* Results. */
    struct kv_session *result; /* being made; the caller's after KV_OK */
    uint32_t tokens;
    uint32_t lease_wanted_ms;   /* open, renew */
    uint32_t tokens_max_wanted; /* open */

    union {
        struct kv_rows_part rows;
        struct kv_fetch_part fetch;
        struct kv_objects_part objects;
        struct kv_query_part query;
        struct kv_index_part index;
        struct {
            struct kv_model_info *model;
            bool *opened; /* (n_nodes) */
        } open;
        struct {
            struct kv_ticket ticket;
            struct kv_resumed *nodes; /* (n_nodes) */
            bool is_overtaken;        /* by another client, while it asked */
        } resume;
        struct {
            struct kv_lifecycle entry;
            uint32_t least; /* tokens committed on all nodes */
            uint32_t n_acked, n_refused;
            bool is_logged;
            struct kv_writers *writers; /* truncate: the session's, when it is done */
        } lifecycle;
        struct {
            uint32_t node, thread, bytes_out, bytes_back;
        } ping;
        struct {
            uint32_t node;
            char name[32];
            struct kv_table table;
            void *memory; /* of the table */
        } table;
    };
    char detail[KV_DETAIL_BYTES];
    void *room; /* kv_op_room(); kept when the operation is freed, for the next */
    size_t room_bytes;
};

/* A new operation; deadline_ms 0: the client's.  KV_BUSY: ops_max exist; KV_NOT_FOUND: the
 * session is closed. */
kv_status_t kv_op_begin(struct kv_client *client,
                        const struct kv_op_kind *kind,
                        struct kv_session *session,
                        struct kv_buffer *buffer,
                        uint32_t deadline_ms,
                        struct kv_op **ret_op);

/* Memory for what begin copies: until the operation is freed.  Asked for once by an operation.
 * NULL: out of memory. */
void *kv_op_room(struct kv_op *op, size_t bytes);
/* Copies `bytes` to *at, which is moved on; returns the copy. */
void *kv_op_keep(uint8_t **at, const void *from, size_t bytes);

/* Gives back one that did not go. */
void kv_op_discard(struct kv_op *op);

/* Its fields are set: off it goes.  Returns KV_OK: what fails now shows in the operation. */
kv_status_t kv_op_go(struct kv_op *op, struct kv_op **ret_op);

void kv_op_need(struct kv_op *op, uint32_t node);
void kv_op_need_all(struct kv_op *op);
/* n_heads 0: all of each layer. */
void kv_op_need_units(struct kv_op *op,
                      uint32_t layer_begin,
                      uint32_t layer_end,
                      uint32_t head_begin,
                      uint32_t n_heads);
bool kv_op_needs(const struct kv_op *op, uint32_t node);

/* Back to PREPARING, with other needs. */
void kv_op_again(struct kv_op *op);

/* Moves on if its nodes are ready. */
void kv_op_prepare(struct kv_op *op);

/* Ends what the operation has to do on the node, of a kind that has `lost`: it is not needed
 * any more. */
void kv_op_lose(struct kv_op *op,
                struct kv_remote *remote,
                kv_status_t status,
                const char *why);

/* Whether something of it is under way with the node, or waits to be. */
bool kv_op_uses(const struct kv_op *op, const struct kv_remote *remote);

/* Ends it with success or op->partial if nothing is left to do. */
void kv_op_check(struct kv_op *op);

/* Ends it.  `remote` may be NULL. */
void kv_op_end(struct kv_op *op, kv_status_t status);
void kv_op_fail(struct kv_op *op,
                const struct kv_remote *remote,
                const struct kv_trip *trip,
                kv_status_t status,
                const char *format,
                ...) __attribute__((format(printf, 5, 6)));

/* Keeps the first failure of an operation that goes on. */
void kv_op_note(struct kv_op *op,
                const struct kv_remote *remote,
                kv_status_t status,
                const char *text);

/* Refuses arguments: sets the client's detail. */
kv_status_t
kv_client_refuse(struct kv_client *client, kv_status_t status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* ---- sessions ---------------------------------------------------------------------------- */

struct kv_session_node {
    uint32_t index;      /* session_index there */
    uint32_t generation; /* that it has answered with */
    uint32_t incarnation;
    bool is_catching_up;
};

struct kv_session {
    struct kv_list of_client;
    struct kv_client *client;
    struct kv_ticket ticket;
    struct kv_id128 fingerprint;
    kv_schema_t schema;
    uint64_t root;
    uint32_t lease_ms;
    uint32_t tokens_max;
    uint32_t generation;        /* that every node has or is brought to */
    struct kv_writers *writers; /* at that generation */
    uint32_t shared_tokens;     /* of its own writer, that forks have inherited, at most */
    bool is_closed;

    struct kv_list ops; /* begun and not ended, in order */
    uint32_t n_queued;
    uint32_t n_exclusive; /* of `ops` */

    struct kv_lifecycle
        log[KV_LIFECYCLE_LOG]; /* what some node may have missed, oldest first */
    uint32_t n_log;

    uint64_t renew_us;
    uint32_t n_renewing;

    uint16_t *slots;                              /* (n_units) placement slot of each unit */
    uint64_t bytes_before[KV_LAYERS_MAX + 1];     /* of one token, in the layers before */
    uint64_t row_bytes_before[KV_LAYERS_MAX + 1]; /* sum of row_bytes of the layers before */
    struct kv_session_node nodes[];
};

/* An empty handle of a finished schema.  NULL: out of memory. */
struct kv_session *
kv_session_make(struct kv_client *client, const kv_schema_t *schema, uint64_t root);

/* A writer that is nobody's yet. */
uint64_t kv_client_draw_writer(struct kv_client *client);

/* KV_OK: the session may be used on that node.  KV_IN_PROGRESS: it is catching up.  Else
 * `detail` says why not. */
kv_status_t kv_session_ready(struct kv_session *session,
                             struct kv_remote *remote,
                             char *detail,
                             size_t detail_bytes);

/* Starts operations that waited for one that has ended. */
void kv_session_admit(struct kv_session *session);

/* Adds to the log; false: it is full. */
bool kv_session_log(struct kv_session *session, const struct kv_lifecycle *entry);
void kv_session_trim(struct kv_session *session);

/* Sends one lifecycle operation to one node. */
kv_status_t kv_lifecycle_send(struct kv_session *session,
                              struct kv_remote *remote,
                              struct kv_op *op,
                              const struct kv_lifecycle *entry,
                              kv_call_done_fn done);

/* Renews leases in the background. */
void kv_sessions_timers(struct kv_client *client, uint64_t *next_us);

/* The first digits of a session's id, for texts.  Returns `text`. */
enum {
    KV_SESSION_TEXT = 24
};
const char *kv_session_text(const struct kv_id128 *id, char text[KV_SESSION_TEXT]);

/* "session 1a2b, layer 3" */
void kv_session_describe(const struct kv_session *session,
                         uint32_t layer,
                         char *text,
                         size_t text_bytes);

/* Best effort: ends a session on one node, nobody waits. */
void kv_session_drop(struct kv_remote *remote, uint32_t index, const struct kv_id128 *token);

/* ---- memory ------------------------------------------------------------------------------ */

struct kv_buffer {
    struct kv_list of_client;
    struct kv_client *client;
    uint8_t *base;
    size_t bytes;
    struct kv_mapping *mapping;
    bool is_owned;
    uint32_t n_holds;
};

static inline void kv_buffer_hold(struct kv_buffer *buffer)
{
    if (buffer != NULL)
        buffer->n_holds++;
}

static inline void kv_buffer_release(struct kv_buffer *buffer)
{
    if (buffer != NULL)
        buffer->n_holds--;
}

/* Whether [offset, offset + bytes) lies in a buffer of this client. */
static inline bool kv_buffer_holds(const struct kv_client *client,
                                   const struct kv_buffer *buffer,
                                   size_t offset,
                                   size_t bytes)
{
    return buffer != NULL && buffer->client == client && offset <= buffer->bytes &&
           bytes <= buffer->bytes - offset;
}

void kv_buffer_destroy(struct kv_buffer *buffer);

/* ---- the client -------------------------------------------------------------------------- */

/* A message that tells and expects nothing: cancel. */
struct kv_notice {
    bool busy;
    struct kv_wire_header header;
};

struct kv_client {
    const struct kv_clock *clock;
    uint64_t now_us; /* of this call */
    struct kv_transport *transport;
    bool owns_transport;
    struct kv_port *port;
    kv_control_open_fn open_control;
    struct kv_random random;
    char name[KV_NAME_BYTES_MAX + 1];
    uint32_t tenant;
    uint32_t credits;
    uint64_t deadline_us, peer_timeout_us, retry_us;

    struct kv_placement placement;
    struct kv_remote *remotes;
    uint32_t n_remotes;
    uint32_t n_failed; /* remotes with a failure noted */

    struct kv_pool *op_pool;
    struct kv_list ops; /* not ended */
    uint32_t n_preparing;
    struct kv_list sessions;
    struct kv_list buffers;
    struct kv_list calls;

    struct kv_pool *trips;
    uint64_t attempts; /* counter for ids; begins at random, so that they cannot be guessed */
    struct kv_envelope *free_small, *free_large;
    uint32_t n_large;
    struct kv_errand *free_errands;
    uint32_t turn_node, turn_thread; /* the lane that may send next */
    struct kv_list receipts;
    struct kv_list control_messages; /* that the transport may hold, or that wait */
    struct kv_notice notices[KV_NOTICES];

    bool must_pump; /* something may be able to move on */
    bool is_closing;
    uint64_t next_us;  /* the earliest moment at which a timer is due */
    uint64_t moved_us; /* when the port last had something to do */
    uint64_t polled_us;
    uint32_t n_ended; /* since the last poll */

    uint64_t n_dropped; /* messages that failed their checks, or that nobody waited for */
    uint64_t n_corrupt; /* answers that failed their checksums */
    char detail[KV_DETAIL_BYTES];
};

/* Makes sure that timers are looked at by then. */
static inline void kv_client_timer(struct kv_client *client, uint64_t at_us)
{
    if (at_us < client->next_us)
        client->next_us = at_us;
}

/* Moves everything on that can be; called where something was begun. */
void kv_client_pump(struct kv_client *client);

/* One turn, but for ending lost connections: messages, carriers, timers. */
void kv_client_step(struct kv_client *client);

/* Sleeps until something may have come, at most until the clock shows until_us. */
void kv_client_nap(struct kv_client *client, uint64_t until_us);

/* Turns and sleeps until the operation has ended (NULL: any) or the clock shows until_us. */
void kv_client_sleep(struct kv_client *client, const struct kv_op *op, uint64_t until_us);

/* net_devices.c: the network devices that lead to the nodes, comma-separated.  A node whose
 * name is not known now, or to which no device leads, is left out: it may be down.  KV_INVALID:
 * an address that is not HOST:PORT, or no name is known; KV_UNREACHABLE: no device leads to
 * any.
 */
kv_status_t kv_device_find(const char *const *addresses,
                           uint32_t n_addresses,
                           char *ret_devices,
                           size_t devices_bytes,
                           char *detail,
                           size_t detail_bytes);
/* Whether a node's address is this host's. */
bool kv_device_is_local(const char *address);

#endif
