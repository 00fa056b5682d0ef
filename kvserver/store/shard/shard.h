/* shard.h - a data thread: its port, its memory, its units, and the requests it is working on.
 *
 *   message --> kv_work --> begin() --+--> answered at once               small requests
 *                                     +--> AWAIT_BULK -> RECEIVING ->+     put by bulk
 *                                     +--> WAITING (for rows) ------>+--> SENDING -> done
 *                                     +--> QUEUED (slices) --------->+
 *
 * One request is one kv_work from its arrival until its answer has left; no other memory is
 * taken for it than what the pools made at start hold.  Work that is QUEUED is done in slices
 * of at most some 100 us, most urgent class first, so no request keeps the thread from others.
 *
 * Every client has works for all credits that it was granted, whatever others do.  What it asks
 * for beyond them, or beyond the buffers that there are, is answered KV_BUSY by a note, which
 * needs no work; so is a ping.  Nothing that a client in order sends is met with silence.
 *
 * Threads: everything here belongs to the data thread, except `stats`, `part.used_us` (readable
 * by all) and the two rings (control -> data -> control).
 */
#ifndef KV_KVSERVER_STORE_SHARD_SHARD_H
#define KV_KVSERVER_STORE_SHARD_SHARD_H

#include "kvserver/base/map.h"
#include "kvserver/base/pool.h"
#include "kvserver/base/ring.h"
#include "kvserver/base/writers.h"
#include "kvserver/store/node.h"
#include "kvserver/store/rows/object.h"
#include "kvserver/store/rows/unit.h"
#include "kvserver/store/shard/ended.h"
#include "kvserver/store/shard/stats.h"

enum {
    KV_WORKS_MAX = 4096, /* requests of one data thread at any moment, shared out at hello */
    KV_CREDITS_MAX = 256,
    KV_CREDITS_SURE = 8, /* of a client that comes when others have all the rest */
    KV_BODIES = 192,     /* bodies and answers of more than KV_MIDDLE_BYTES */
    KV_BODIES_KEPT = 64, /* of them, for requests that wait neither for rows nor for data */
    KV_BODIES_PUTS = 64, /* besides, for those that wait for data: others wait for their rows */
    KV_BODIES_PEER = 128,  /* that one client may hold */
    KV_STAGINGS = 32,      /* requests with a staging buffer */
    KV_STAGINGS_KEPT = 8,  /* of them, for answers */
    KV_STAGINGS_PEER = 16, /* that one client may hold */
    KV_RECEIPTS = 32,      /* requests whose body is on its way, besides */
    KV_RECEIPTS_PEER = 8,  /* of them, of one client */
    KV_NOTES = 4,          /* replies on their way to one client that no work stands behind */
    KV_NOTE_BYTES = 96,
    KV_SMALL_BYTES = 512,
    KV_MIDDLE_BYTES = 4096,     /* of a body that every work has room for, besides */
    KV_PINS_MAX = 144,          /* segments that one transfer pins */
    KV_SLICE_BYTES = 256 << 10, /* copied or checked in one slice */
};

/* What a data thread knows of a session. */
struct kv_part {
    bool used;
    bool changing; /* some of its units are of the generation before: nobody may use it */
    uint32_t index;
    uint32_t generation;
    uint32_t serial; /* of the slot: a work that outlives its session notices */
    struct kv_id128 token;
    uint32_t tenant;
    const kv_schema_t *schema; /* the control thread's, while the session lives */
    uint64_t root;
    uint32_t epoch;
    uint32_t tokens_max;
    struct kv_unit *units; /* (n_units) of this thread */
    uint16_t *unit_of;     /* (schema->n_units) index into `units`; UINT16_MAX: not here */
    uint32_t n_units;
    int units_class, unit_of_class;
    const struct kv_writers *writers; /* the control thread's, until another comes or it ends */
    struct kv_work *waiters;
    bool is_woken; /* waiters that need woken_to tokens at most are to look again */
    uint32_t woken_to;
    struct kv_part *woken_next;
    _Atomic uint64_t used_us; /* when a request last named it */
};

/* What the control thread asks of a data thread; answered with the same struct.  Its memory is
 * the control call's, or the peer's that it is about. */
enum kv_command_kind {
    KV_COMMAND_PEER_OPEN,
    KV_COMMAND_PEER_CLOSE,
    KV_COMMAND_SESSION_OPEN,
    KV_COMMAND_SESSION_FORK,
    KV_COMMAND_SESSION_GENERATION,
    KV_COMMAND_SESSION_TRUNCATE,
    KV_COMMAND_SESSION_CLOSE,
    KV_COMMAND_SESSION_LENGTH,
    KV_COMMAND_PEER_STUCK, /* data -> control: a client lost its channel */
};

struct kv_command {
    enum kv_command_kind kind;
    uint32_t thread;
    kv_status_t status; /* answer */
    void *owner;        /* the control thread's */

    uint32_t index, child_index; /* of sessions, or of a client */
    struct kv_id128 token;
    uint32_t tenant;
    uint32_t generation;
    uint32_t tokens;

    uint64_t root; /* session_open */
    uint32_t epoch, n_nodes, node_index, tokens_max;
    const kv_schema_t *schema;
    const struct kv_writers *writers; /* session_open, _fork: the new one's; _truncate: what is
                                         left */

    struct kv_ended ended; /* session_close: what later requests are told */

    enum kv_channel_mode mode; /* peer_open */
    uint32_t credits;
    uint32_t address_bytes;
    const uint8_t *address;

    uint32_t cursor; /* data thread's: units done */
    uint64_t bytes;  /* session_length answer */
    bool has_units;
};

enum kv_peer_state {
    KV_PEER_FREE = 0,
    KV_PEER_OPEN,
    KV_PEER_CLOSING, /* no channel any more; works still finish */
};

/* A reply that no work stands behind. */
struct kv_note {
    struct kv_peer *peer;
    bool busy;
    struct kv_wire_header header;
    char text[KV_NOTE_BYTES];
};

/* A client, as a data thread sees it. */
struct kv_peer {
    enum kv_peer_state state;
    uint32_t index;
    struct kv_id128 token;
    uint32_t tenant; /* that hello said */
    struct kv_channel *channel;
    uint32_t credits;                          /* as hello granted */
    uint32_t puts_settled;                     /* object_puts below have ended for the client */
    uint64_t puts_done[KV_WIRE_PUTS_MAX / 64]; /* from there on, which have been stored */
    struct kv_work *works;                     /* all of its works */
    uint32_t n_works, n_bodies, n_stagings, n_receipts, n_notes;
    uint64_t heard_us; /* a message came, or data landed */
    uint64_t due_us;   /* before, no work of it has to be looked at */
    struct kv_note notes[KV_NOTES];
    bool is_told; /* the control thread, of the channel's loss */
    struct kv_command notice;
    struct kv_stash { /* bulk that came before its request */
        struct kv_incoming *incoming;
        uint64_t request_id;
        uint64_t bytes;
        uint64_t since_us;
    } stash[4];
    _Atomic uint64_t requests, busy, dropped, rows_in, rows_out, in_flight; /* for lists */
};

enum kv_work_state {
    KV_WORK_FREE = 0,
    KV_WORK_BEGUN,
    KV_WORK_AWAIT_BULK,
    KV_WORK_RECEIVING,
    KV_WORK_WAITING,
    KV_WORK_QUEUED,
    KV_WORK_SENDING,
};

/* Service classes, most urgent first. */
enum kv_class {
    KV_CLASS_QUERY,
    KV_CLASS_READ,
    KV_CLASS_APPEND,
    KV_CLASS_PUT,
    KV_CLASS_COUNT,
};

/* Works in the order in which they came. */
struct kv_work_queue {
    struct kv_work *first, **end;
};

struct kv_work {
    enum kv_work_state state;
    struct kv_data *data;
    const struct kv_op_row *row;
    struct kv_peer *peer;
    struct kv_work *peer_next, **peer_link; /* of the peer's works */
    struct kv_work *next, **link;           /* of a part's waiters, or of a queue */
    struct kv_work_queue *queue;            /* it is in; NULL: none */
    uint32_t needs; /* tokens that must be there before it looks again; UINT32_MAX: others */
    struct kv_wire_header request;
    uint64_t begin_us, deadline_us;
    uint64_t since_us; /* the client has to send or to take something */
    bool orphan;       /* nobody waits for the answer any more */

    /* Where the request applies; valid while part_serial is the part's. */
    struct kv_part *part;
    uint32_t part_serial;

    /* The request's body after begin(), if the operation keeps it; aligned. */
    uint8_t *body;
    uint8_t *body_slot;

    /* Bulk data: where it lands. */
    struct kv_iov iov[KV_IOV_MAX];
    unsigned n_iov;
    bool discard; /* refuse the bulk, then answer `status` */
    bool landing; /* units count this work in n_landings */
    bool coming;  /* ... in n_coming */
    bool landed;
    kv_status_t status;
    struct kv_segment *pins[KV_PINS_MAX];
    unsigned n_pins;
    struct kv_stored_object *object; /* pinned */
    uint8_t *staging;

    /* Progress of a sliced operation. */
    uint32_t cursor_unit, cursor_row;
    size_t cursor_bytes;
    uint64_t serial; /* index: of the newest codebook when it began */

    /* The answer. */
    struct kv_wire_header reply, reply_bulk;
    struct kv_iov pair[2]; /* body and bulk, where they leave in one message */
    uint8_t *answer, *answer_slot;
    unsigned n_sends;
    kv_status_t send_status;
    uint8_t small[KV_SMALL_BYTES] __attribute__((aligned(16)));
};

struct kv_indexer;
struct kv_querier;
struct kv_scrub;

struct kv_data {
    struct kv_node *node;
    uint32_t index;
    uint32_t n_threads;
    uint64_t stuck_send_us;
    const struct kv_clock *clock;
    uint64_t now_us;   /* of this step */
    uint64_t moved_us; /* of the last step in which a message or a request got on */
    struct kv_port *port;
    struct kv_arena *arena;
    struct kv_heap heap;
    struct kv_objects objects;
    struct kv_indexer *indexer;
    struct kv_querier *querier;
    struct kv_scrub *scrub;
    bool scrub_is_next;    /* when something in the background has its turn */
    uint32_t query_slices; /* since messages were last looked at */
    uint32_t turns;        /* steps since the last slice in the background */
    struct kv_part *parts; /* (sessions_max) */
    uint32_t n_parts;
    struct kv_ended_list ended; /* of those */
    struct kv_peer *peers;      /* (clients_max) */
    uint32_t n_peers;
    struct kv_pool *works, *bodies, *stagings, *receipts;
    struct kv_pool *middles; /* one for each work, under its number */
    struct kv_work_queue queues[KV_CLASS_COUNT];
    struct kv_work_queue unstaged; /* need a staging buffer: the next that comes back is the
                                    * first's that may have it */
    struct kv_work_queue looking;  /* woken: look again, some in each step */
    struct kv_part *woken, **woken_end; /* parts, in the order in which they were */
    struct kv_ring *commands;           /* from control */
    struct kv_command *command;         /* under way, in slices */
    struct kv_ring *answers;            /* to control, shared by all data threads */
    bool answers_due; /* something went into `answers` since the driver last looked */
    _Atomic bool draining;
    uint64_t timers_us;       /* next look at deadlines */
    _Atomic uint64_t seen_us; /* when it last looked: /health is about that */
    uint64_t marks;           /* requests that named units */
    struct kv_stats stats;
};

/* ---- shard.c: life, one step ---- */

struct kv_data_setup {
    struct kv_node *node;
    uint32_t index, n_threads, n_parts, n_peers, n_commands, n_works;
    uint64_t memory_bytes, scrub_bytes, stuck_send_us, secret, object_version;
    const struct kv_clock *clock;
    struct kv_transport *transport;
    struct kv_ring *answers;
};

kv_status_t kv_data_init(struct kv_data *data, const struct kv_data_setup *setup);
void kv_data_fini(struct kv_data *data);
bool kv_data_step(struct kv_data *data);

/* NULL: the schema has no such unit, or another thread or node has it. */
struct kv_unit *kv_part_unit(const struct kv_part *part, uint32_t layer, uint32_t kv_head);

/* Compares rows of a unit with their CRCs, by the writers that the session says they have.
 * Returns the index of the first row that differs, `count` if none does.
 *   rows  (count, unit->row_bytes) of the tokens from `begin` on */
uint32_t kv_part_verify(const struct kv_part *part,
                        const struct kv_unit *unit,
                        uint32_t begin,
                        uint32_t count,
                        const void *rows,
                        const uint32_t *crcs);

/* Waiters of the part that need `tokens` at most look again, in the steps to come: never inside
 * this call.  UINT32_MAX: all of them do. */
void kv_part_wake(struct kv_data *data, struct kv_part *part, uint32_t tokens);

/* ---- shard.c: what operations use ---- */

/* Copies the request's body where it stays aligned until the work ends.  KV_BUSY: no slot. */
kv_status_t kv_work_keep_body(struct kv_work *work, const uint8_t *body);

/* A buffer of KV_WIRE_BODY_MAX for the answer's body.  KV_BUSY: no slot. */
kv_status_t kv_work_answer_slot(struct kv_work *work, size_t bytes);

/* The session is not the one that the work began with: closed, or another generation. */
bool kv_work_stale(const struct kv_work *work);

/* State WAITING, until so many tokens are there (`needs`); or the work has failed: too many
 * wait with large bodies. */
void kv_work_wait(struct kv_work *work, uint32_t needs);
void kv_work_queue(struct kv_work *work); /* state QUEUED */
/* The same, in a queue of the operation's own: who owns that calls kv_work_queue(). */
void kv_work_queue_at(struct kv_work *work, struct kv_work_queue *queue);
void kv_work_await_bulk(struct kv_work *work, bool discard); /* state AWAIT_BULK */

/* Takes a staging buffer for data that is still to come; false: there is none for that, or the
 * client has enough. */
bool kv_work_stage_bulk(struct kv_work *work);

/* Takes a staging buffer.  false: there is none, or the client has enough, and the work is
 * queued again with one. */
bool kv_work_stage(struct kv_work *work);

/* Ends the work with an error and a text; for a request whose bulk is still to come, when that
 * has come and been refused. */
void kv_work_fail(struct kv_work *work, kv_status_t status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Sends reply (header fields of work->reply as set by the operation), body and bulk; the work
 * ends when they have left. */
void kv_work_answer(struct kv_work *work,
                    const void *body,
                    size_t body_bytes,
                    const void *bulk,
                    size_t bulk_bytes);

/* ---- command.c: what the control thread asks ---- */

/* Does a slice of the command under way; true if there was one. */
bool kv_data_command_step(struct kv_data *data);
void kv_peer_close(struct kv_data *data, struct kv_peer *peer);

#endif
