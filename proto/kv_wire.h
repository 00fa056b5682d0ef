/* kv_wire.h - the data plane: the messages between clients and nodes, byte by byte.
 *
 * A request is one message: a header of 160 bytes and a body.  Rows or object bytes that do not
 * fit the body are its bulk.  If the transport can send them in the same message, bulk_bytes
 * follow the body.  If not, they travel in a second message of kind BULK with the same request
 * id, so that they need not be copied next to the body.  A reply has the same forms.  The BULK
 * message may arrive first.
 *
 *      client                                   node
 *      REQUEST {header, body} ---------------->  checked, then executed
 *      BULK    {header, rows} ---------------->  (put, append, object_put only)
 *                      <----------------  REPLY {header, body}
 *                      <----------------  BULK  {header, rows}
 *                                               (fetch, read, query, object_get)
 *
 * Requests of one client to one data thread that have no bulk may travel together, in a message
 * of kind BATCH: its body is n_units requests of any ops and sessions, each a header and a body
 * as above, padded with zeros to a multiple of KV_WIRE_BATCH_ALIGN.  The batch saves messages
 * and nothing else: each request in it has its own id, deadline, credit and checksums (so the
 * batch has none of its body: body_crc is 0), and is answered on its own, as if it had come
 * alone.  A request that fails its checks is dropped with those behind it, which are sent
 * again like any that is lost.  A batch for which the node has no buffer is answered once for
 * all: by KV_BUSY to its request_id, the first request's, with its n_units.
 *
 * From version 8 on, replies that a node makes at one time for one client may travel together in
 * the same way: a BATCH with n_units replies without bulk, each with its own request_id, status
 * and checksums, and meant as if it had come alone.  They need not be those of one batch of
 * requests, and the KV_BUSY that answers all of one is not among them.  A reply that fails its
 * checks is dropped with those behind it.  Such a batch arrives with its body (net/transport.h:
 * a small message).
 *
 * Bodies, in order, without padding between the arrays:
 *
 *   put, append    units[n_units], crcs[n_units][token_count], rows if bulk_bytes is 0
 *   read           units[n_units]                 of the tokens token_begin, token_count
 *   fetch          units[n_units], ids[sum of n_ids]
 *   index          struct kv_wire_index, units[n_units]
 *   query          struct kv_wire_query, units[n_units], ranges[n_ranges],
 *                  with KV_WIRE_EACH: candidates[n_units], as in the query, 32 bits each,
 *                  queries[n_units][n_queries][d_k] in fp32, cached[sum of n_ids]
 *   object_put     name[name_bytes], crcs[pieces of object_bytes], bytes if bulk_bytes is 0
 *   object_*       name[name_bytes]
 *   ping           up to KV_WIRE_BODY_MAX bytes; the reply has `token_count` bytes
 *   cancel         nothing; `offset` is the request id to cancel
 *   control ops    a protobuf message of kvstore.proto (loopback and simulator only: over a
 *                  network gRPC carries them)
 *   replies        read, fetch: crcs[n_rows], rows if bulk_bytes is 0
 *                  object_get:  the bytes if bulk_bytes is 0
 *                  index:       struct kv_wire_index_result
 *                  query:       struct kv_wire_query_times,
 *                               with KV_WIRE_READS: struct kv_wire_query_reads,
 *                               results[n_units], ids[sum of n_ids],
 *                               with KV_WIRE_WEIGHTS: weights[sum of n_ids] in fp32,
 *                               with KV_MERGE_NONE: query_masks[sum of n_ids],
 *                               with KV_ANSWER_ATTEND or summaries: outputs
 *                               [n_units][n_queries][d_v], log-sum-exps [n_units][n_queries],
 *                               in fp32,
 *                               with KV_ANSWER_ROWS: crcs[n_rows], rows if bulk_bytes is 0
 *                  failures:    an error message, not 0-terminated
 *
 * An object is stored and read in pieces of KV_WIRE_BULK_MAX bytes; the last piece is shorter.
 * Piece i has a CRC32C seeded with kv_object_seed(name) + i, from the client that put it.
 *
 * A client may send a request again under another id while the node still has the first one, so
 * every operation has the same effect once and twice.  object_delete names a version, not only
 * a name: the client learns it from object_exists.  Deleting a version that does not exist
 * succeeds and leaves a later object of that name alone.  A client numbers its object_puts to a
 * data thread from 0 in each connection.  The node stores each number once, at most
 * KV_WIRE_PUTS_MAX - 1 above put_settled and none below it, so that a put that is resent or
 * late cannot restore an object that was deleted.
 *
 * A client's identity is what the node has recorded, never what a message claims.  Hello binds
 * a tenant to a client and assigns it an index and a token: 128 random bits that only the
 * client and the node know.  Both are in every message.  A message that names a client without
 * its token is dropped before anything is counted or stored for that client; one that names a
 * tenant other than hello's is rejected with KV_DENIED.  A session belongs to the tenant of the
 * client that opened it; clients of that tenant that have the session's token may use it.  A
 * reply, and its bulk, repeats request_id, op, client_index, client_token, session_index and
 * generation of the request; a client drops a reply that does not.
 *
 * Rows are (unit, token, row_bytes) in the order of the request.  All numbers are
 * little-endian.  Messages are untrusted: nothing is used before kv_message_check()
 * (net/message.h) and the operation's own bounds checks have passed.
 */
#ifndef KV_PROTO_KV_WIRE_H
#define KV_PROTO_KV_WIRE_H

#include "proto/kv_types.h"

#include <assert.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The versions of the protocol that this build speaks, the least and the greatest.  Hello says
 * both; a node and a client use the greatest that both speak, in every message.  A peer with
 * which there is none is refused with KV_VERSION, and both numbers are named.
 *
 *   6  the first with which later builds are compatible
 *   7  a reply's header says how long the node had the request
 *   8  replies may travel together
 *   9  prefixes are shared by content; objects have times, and are listed: fields and operations
 *      that kvstore.proto says so of, and two fields of object_put
 *  10  codes of rotated keys, copies of keys, first cuts, summaries per 3,072 rows: fields of an
 *      index request, of a query and of its reply
 *  11  nodes verify what they have when they are asked: an operation
 *  12  nodes save what a session shares when they are asked: an operation
 *
 * A change that an earlier version would misread raises both numbers; one that it can do
 * without raises the greatest alone, is listed here, and is not sent to a peer below it.
 */
#define KV_WIRE_VERSION_LEAST     6
#define KV_WIRE_VERSION_NODE_TIME 7
#define KV_WIRE_VERSION_REPLIES   8
#define KV_WIRE_VERSION_PREFIXES  9
#define KV_WIRE_VERSION_FIRST_CUT 10
#define KV_WIRE_VERSION_VERIFY    11
#define KV_WIRE_VERSION_SAVE      12
#define KV_WIRE_VERSION           12

/* The version that two peers use, given the least and the greatest that each speaks; 0: there
 * is none. */
static inline uint32_t kv_wire_version_of(uint32_t least,
                                          uint32_t greatest,
                                          uint32_t peer_least,
                                          uint32_t peer_greatest)
{
    uint32_t version = greatest < peer_greatest ? greatest : peer_greatest;

    return version >= least && version >= peer_least ? version : 0;
}

enum {
    KV_WIRE_BODY_MAX = 192 << 10,  /* body of one message */
    KV_WIRE_INLINE_MAX = 64 << 10, /* rows or object bytes inside a body */
    KV_WIRE_BULK_MAX = 1 << 20,    /* rows in one bulk message */
    KV_WIRE_UNITS_MAX = 4096,      /* units in one message */
    KV_WIRE_ROWS_MAX = 16384,      /* rows in one message */
    KV_WIRE_ENTRIES_MAX = 64,      /* requests, or replies, in one batch */
    KV_WIRE_BATCH_ALIGN = 16,      /* of the entries in it */
    KV_WIRE_CONTROL_MAX = 1 << 20, /* a control message, request or reply */
    KV_WIRE_NAMES_MAX = 32768,     /* names of blocks in one */
    KV_WIRE_OBJECTS_MAX = 1000,    /* objects listed in one reply */
    KV_WIRE_ADDRESS_MAX = 4096,    /* a port's address */
    KV_WIRE_PUTS_MAX = 1024,       /* object_puts from put_settled on; a multiple of 64 */

    KV_THREADS_MAX = 128, /* data threads of a node, and addresses in hello's reply */
    KV_CREDITS_MAX = 256, /* requests of one client in flight to one data thread */

    /* No request waits longer: a node reduces a later deadline to this. */
    KV_WIRE_DEADLINE_MAX_US = 10 * 60 * 1000 * 1000,
};

enum kv_wire_kind {
    KV_WIRE_REQUEST = 1,
    KV_WIRE_REPLY = 2,
    KV_WIRE_BULK_REQUEST = 3, /* data that belongs to a request */
    KV_WIRE_BULK_REPLY = 4,   /* data that belongs to a reply */
    KV_WIRE_BATCH = 5,        /* requests, or replies, one behind the other */
};

/* Operations of both planes, one number each; never renumbered. */
enum kv_op_id {
    KV_OP_PING = 1,
    KV_OP_PUT = 2,
    KV_OP_APPEND = 3,
    KV_OP_FETCH = 4,
    KV_OP_READ = 5,
    KV_OP_CANCEL = 6,
    KV_OP_OBJECT_PUT = 7,
    KV_OP_OBJECT_GET = 8,
    KV_OP_OBJECT_EXISTS = 9,
    KV_OP_OBJECT_DELETE = 10,
    KV_OP_INDEX = 11,
    KV_OP_QUERY = 12,

    KV_OP_HELLO = 32,
    KV_OP_GOODBYE = 33,
    KV_OP_MODEL = 34,
    KV_OP_OPEN = 35,
    KV_OP_RESUME = 36,
    KV_OP_FORK = 37,
    KV_OP_TRUNCATE = 38,
    KV_OP_CLOSE = 39,
    KV_OP_RENEW = 40,
    KV_OP_SESSION = 41,
    KV_OP_TABLE = 42,
    KV_OP_DRAIN = 43,
    KV_OP_PUBLISH = 44,
    KV_OP_MATCH = 45,
    KV_OP_PREFIX = 46,
    KV_OP_OBJECTS = 47,
    KV_OP_VERIFY = 48,
    KV_OP_SAVE = 49,
    KV_OP_COUNT = 50, /* one more than the largest number */
};

/* Of an object_put: when memory is short, the object may go. */
#define KV_WIRE_OBJECT_EVICTABLE 1u
/* Of an object_exists: its client is to delete the object, and to be told that there is none only when
 * none can be there again, whatever becomes of the node.  KV_BUSY: ask again. */
#define KV_WIRE_OBJECT_TO_DELETE 1u

/* Every message starts with this header.
 *
 *    0  u16  version        that hello agreed on; in a hello over this transport, the least
 *    2  u8   kind           enum kv_wire_kind
 *    3  u8   op             enum kv_op_id
 *    4  i32  status         replies: kv_status_t; 0 elsewhere
 *    8  u64  request_id     chosen by the client, unpredictable to others; repeated in the
 *                         reply and in bulk messages
 *   16  u32  client_index   from hello; selects where the reply is sent
 *   20  u32  session_index  from open, fork or resume; 0 if the op has no session
 *   24  u32  generation     of the session, as the sender knows it
 *   28  u32  tenant         as in hello
 *   32  u8   token[16]      the session's token; 0 if the op has no session
 *   48  u8   client_token[16]  from hello, in replies too; in a hello: its client_id
 *   64  u32  epoch          of the map of nodes, folded (kv_placement_epoch32()): requests: by
 *                         which the sender placed what it asks for; replies: by which the
 *                         session was placed, without a session the request's
 *   68  u32  deadline_us    requests: microseconds from now, at most KV_WIRE_DEADLINE_MAX_US;
 *                         not 0.  replies: microseconds that the node had the request,
 *                         waiting and at work; 0 below version 7
 *   72  u32  flags          0
 *   76  u32  body_bytes     that follow the header in this message
 *   80  u64  bulk_bytes     that follow the body or are in a bulk message; there: its own data
 *   88  u32  body_crc       CRC32C of the body
 *   92  u32  n_units        in a batch: its entries; in the KV_BUSY that answers a batch: its
 *                         requests; in any other reply 0
 *   96  u32  token_begin    object_put, from version 9 on: milliseconds after which the object is
 *                         removed, at most KV_OBJECT_TTL_MAX_MS; 0: the node's default;
 *                         KV_OBJECT_TTL_NONE: never
 *  100  u32  token_count    object_put, from version 9 on: KV_WIRE_OBJECT_EVICTABLE, or 0;
 *                         object_exists: KV_WIRE_OBJECT_TO_DELETE, or 0
 *  104  u32  snapshot       requests: tokens that must be committed; the node waits for them.
 *                         put, append: token_begin if other messages of this client carry the
 *                         rows before it, else 0: a gap that no outstanding put at the node
 *                         fills then fails with KV_NOT_READY at once.  replies: committed
 *                         tokens
 *  108  u32  layer          replies: the first unit's layer
 *  112  u64  offset         object_get: first byte of the requested piece; cancel: a request id
 *  120  u64  object_bytes   the whole object's size; object_get requests: 0
 *  128  u64  object_version  a number that no other object of the name ever has: in object_get
 *                         and object_exists replies the object's, in object_delete the one to
 *                         delete
 *  136  u32  object_crc     object_get replies: the piece's CRC, as its writer computed it
 *  140  u32  n_rows         replies: rows in the reply
 *  144  u32  name_bytes
 *  148  u32  put_number     object_put: its number, the same each time it is sent
 *  152  u32  put_settled    the client waits for no object_put below this number
 *  156  u32  header_crc     CRC32C of bytes 0..155
 */
struct kv_wire_header {
    uint16_t version;
    uint8_t kind;
    uint8_t op;
    int32_t status;
    uint64_t request_id;
    uint32_t client_index;
    uint32_t session_index;
    uint32_t generation;
    uint32_t tenant;
    struct kv_id128 token;
    struct kv_id128 client_token;
    uint32_t epoch;
    uint32_t deadline_us;
    uint32_t flags;
    uint32_t body_bytes;
    uint64_t bulk_bytes;
    uint32_t body_crc;
    uint32_t n_units;
    uint32_t token_begin;
    uint32_t token_count;
    uint32_t snapshot;
    uint32_t layer;
    uint64_t offset;
    uint64_t object_bytes;
    uint64_t object_version;
    uint32_t object_crc;
    uint32_t n_rows;
    uint32_t name_bytes;
    uint32_t put_number;
    uint32_t put_settled;
    uint32_t header_crc;
};
static_assert(sizeof(struct kv_wire_header) == 160, "the header is 160 bytes on the wire");
static_assert(offsetof(struct kv_wire_header, token) == 32, "as in the byte table");
static_assert(offsetof(struct kv_wire_header, bulk_bytes) == 80, "as in the byte table");
static_assert(offsetof(struct kv_wire_header, offset) == 112, "as in the byte table");
static_assert(offsetof(struct kv_wire_header, header_crc) == 156, "as in the byte table");

/* Returns the bytes that a request or a reply with a body takes in a batch. */
static inline size_t kv_wire_entry_bytes(size_t body_bytes)
{
    return sizeof(struct kv_wire_header) +
           (body_bytes + KV_WIRE_BATCH_ALIGN - 1) / KV_WIRE_BATCH_ALIGN * KV_WIRE_BATCH_ALIGN;
}

/* One unit of a request.
 *
 *    0  u16  layer
 *    2  u16  kv_head
 *    4  u32  n_ids      fetch: this unit's ids in `ids`; query: its blocks in `cached`; 0
 *                       elsewhere
 */
struct kv_wire_unit {
    uint16_t layer;
    uint16_t kv_head;
    uint32_t n_ids;
};
static_assert(sizeof(struct kv_wire_unit) == 8, "a unit is 8 bytes on the wire");

/* Builds product-quantized codes for the keys of the rows before token_count, in the request's
 * units, one codebook per chapter (PQCache, arXiv:2407.12820, section 3.2).
 *
 *    0  u32  chapter_blocks  blocks that share a codebook, counted from token 0; 0: one
 *                            codebook for all rows, with which later rows are coded, too
 *    4  u16  m               subspaces of a key
 *    6  u16  bits            of a code
 *    8  u32  iterations      of k-means at most, 1..KV_KMEANS_ITERATIONS_MAX
 *   12  u32  budget_us       microseconds of thread time per codebook; 0: no limit
 *   16  u64  seed
 *   24  u32  flags           of kv_wire_index_flags
 *   28  u16  summaries       to build per group of blocks: 0 (none), 16 or 64
 *   30  u16  summary_blocks  of a group: 8 or 24; 0: 8.  Other than 0 to nodes from
 *                            KV_WIRE_VERSION_FIRST_CUT on
 */
enum kv_wire_index_flags {
    KV_WIRE_INDEX_WAIT = 1 << 0,    /* reply when the codes exist, not at once */
    KV_WIRE_INDEX_ROTATES = 1 << 1, /* codes are of rotated keys (kernels/rotation.h); to nodes
                                     * from KV_WIRE_VERSION_FIRST_CUT on */
    KV_WIRE_INDEX_COPIES =
        1 << 2, /* beside the codes, copies of the keys in 4 bits; as above */
    KV_WIRE_INDEX_FLAGS = KV_WIRE_INDEX_WAIT | KV_WIRE_INDEX_ROTATES | KV_WIRE_INDEX_COPIES,
};

struct kv_wire_index {
    uint32_t chapter_blocks;
    uint16_t m;
    uint16_t bits;
    uint32_t iterations;
    uint32_t budget_us;
    uint64_t seed;
    uint32_t flags;
    uint16_t summaries;
    uint16_t summary_blocks;
};
static_assert(sizeof(struct kv_wire_index) == 32, "as in the byte table");

/* The result of an index request, summed over its units.
 *
 *    0  u64  rows         before token_count
 *    8  u64  rows_coded   of them with codes, at the time of the reply
 *   16  u32  n_found      codebooks that existed before
 *   20  u32  n_trained    codebooks that this request waited for
 *   24  u32  n_pending    codebooks not built yet
 *   28  u32  iterations   of k-means, summed over n_trained
 *   32  u64  train_us     microseconds of thread time, summed over n_trained
 */
struct kv_wire_index_result {
    uint64_t rows;
    uint64_t rows_coded;
    uint32_t n_found;
    uint32_t n_trained;
    uint32_t n_pending;
    uint32_t iterations;
    uint64_t train_us;
};
static_assert(sizeof(struct kv_wire_index_result) == 40, "as in the byte table");

enum kv_wire_query_flags {
    KV_WIRE_WEIGHTS = 1 << 0, /* return the merged weights of the ids returned */
    KV_WIRE_IDS = 1 << 1,     /* KV_ANSWER_ATTEND: return all selected ids, not only cached */
    KV_WIRE_EACH = 1 << 2,    /* each unit has its own number of candidates; to nodes from
                               * KV_WIRE_VERSION_FIRST_CUT on, as are those that follow */
    KV_WIRE_READS = 1 << 3,   /* return what was read */
};

/* Selects, in each unit of the request, the rows that matter most to its query vectors.
 *
 *   step 1   Every eligible row is scored by its code, or by its key if it has no code.
 *            Weights are computed and merged; the rerank * k rows of largest weight become
 *            candidates.
 *   step 2   The candidates are scored by their keys.  Weights over them alone are computed and
 *            merged; the k rows of largest weight are selected.
 *   step 3   If requested: attention over the selected rows that are not cached, and what the
 *            rows that were not selected would have added, estimated from their summaries
 *            (kernels/estimate.h): one output and log-sum-exp per query vector, together.
 *
 * With a first cut, step 1 takes candidates * k rows instead, and these are scored by the copies
 * of their keys (kernels/key_copies.h), or by their keys if they have none.  Weights over them
 * alone are computed and merged; the rerank * k rows of largest weight go to step 2.  Step 2
 * with rerank 1 has nothing left to select: then it is skipped unless weights are requested.
 * With TOP, and SUM or MAX, step 1 ranks rows by bytes instead of weights
 * (kvserver/store/query/byte_scores.h), where the eligible rows are enough for that.
 *
 * With NONE, a vector attends to the rows that it selected; else to all selected rows.  Only
 * eligible rows contribute.  If an output is not finite, because a row has a NaN or an
 * infinity, the query fails with KV_INVALID.  (A score that is NaN counts as -inf: that row
 * comes last.)
 *
 * Ties go to the lower token.  With UNION and NONE, k, rerank * k and candidates * k are per
 * query vector.
 *
 *    0  u8   answer      enum kv_answer
 *    1  u8   merge       enum kv_merge
 *    2  u16  n_queries   query vectors per unit, 1..KV_QUERIES_MAX
 *    4  u32  k           1..KV_SELECTED_MAX
 *    8  u32  rerank      1..KV_CANDIDATES_MAX; rerank * k is reduced to that (UNION and NONE:
 *                        KV_SELECTED_MAX), never below k.  Below KV_WIRE_VERSION_FIRST_CUT it is
 *                        KV_SELECTED_MAX in both cases
 *   12  f32  scale       of scores before the softmax: usually 1 / sqrt(d_k)
 *   16  u32  n_ranges    the tokens of these ranges are eligible; ascending and disjoint
 *   20  u32  flags       enum kv_wire_query_flags
 *   24  u16  summaries   per group of blocks, for the estimate: 0 (none), 16 or 64; rows
 *                        without so many summaries, of such groups, are attended exactly
 *   26  u16  summary_blocks  as in kv_wire_index
 *   28  u32  selection   enum kv_selection: how many rows are selected, at most k.  Step 1
 *                        applies it, and passes rerank times as many rows to step 2
 *   32  f32  fraction    MASS: of all weight; THRESHOLD: of the largest; above 0, at most 1.
 *                        0 with TOP
 *   36  u8   first_cut   enum kv_first_cut
 *   37  u8   reserved    0
 *   38  u16  candidates  with a first cut: rerank.. ; candidates * k is reduced as rerank * k is;
 *                        without one 0
 *
 * With KV_WIRE_EACH, a unit's own number takes the place of `candidates`, or of `rerank` if
 * there is no first cut, and has its bounds.
 */
struct kv_wire_query {
    uint8_t answer;
    uint8_t merge;
    uint16_t n_queries;
    uint32_t k;
    uint32_t rerank;
    float scale;
    uint32_t n_ranges;
    uint32_t flags;
    uint16_t summaries;
    uint16_t summary_blocks;
    uint32_t selection;
    float fraction;
    uint8_t first_cut;
    uint8_t reserved;
    uint16_t candidates;
};
static_assert(sizeof(struct kv_wire_query) == 40, "as in the byte table");

/* Tokens [begin, end). */
struct kv_wire_range {
    uint32_t begin;
    uint32_t end;
};
static_assert(sizeof(struct kv_wire_range) == 8, "a range is 8 bytes on the wire");

/* A block of a unit that the client has cached: its rows are selected like others, but not
 * sent.
 *
 *    0  u32  block
 *    4  u32  fingerprint  kv_wire_block_fingerprint() of the CRCs that came with those rows; if
 *                         the node's block has other rows, they are sent
 */
struct kv_wire_cached_block {
    uint32_t block;
    uint32_t fingerprint;
};
static_assert(sizeof(struct kv_wire_cached_block) == 8, "8 bytes on the wire");

/* A query's reply: times of the whole message, in microseconds.
 *
 *    0  u32  queue_us    from arrival until work begins
 *    4  u32  service_us  from there until the reply
 */
struct kv_wire_query_times {
    uint32_t queue_us;
    uint32_t service_us;
};
static_assert(sizeof(struct kv_wire_query_times) == 8, "as in the byte table");

/* A query's reply: bytes that the node read of its memory for the whole message, each piece once
 * for each unit that it was read for.
 *
 *    0  u64  books      centroids, and matrices of rotations
 *    8  u64  codes      or the lists of rows by code
 *   16  u64  copies
 *   24  u64  keys       scored
 *   32  u64  rows       attended or sent
 *   40  u64  summaries
 */
struct kv_wire_query_reads {
    uint64_t books;
    uint64_t codes;
    uint64_t copies;
    uint64_t keys;
    uint64_t rows;
    uint64_t summaries;
};
static_assert(sizeof(struct kv_wire_query_reads) == 48, "as in the byte table");

/* A query's reply: the result of one unit, in the order of the request.
 *
 *    0  u16  layer
 *    2  u16  kv_head
 *    4  u32  n_ids             selected tokens, ascending; KV_WIRE_ID_CACHED is set in those
 *                              whose rows are cached; with KV_ANSWER_ATTEND only those, unless
 *                              KV_WIRE_IDS
 *    8  u32  n_scored_by_code  eligible rows that step 1 scored by code
 *   12  u32  n_scored_by_key   eligible rows that step 1 scored by key
 *   16  u32  n_reranked        candidates that were scored by key, in the first cut and in step 2:
 *                              one may count in both
 *   20  u32  n_chapters        codebooks used
 *   24  f32  recall            of exact top-k, a moving average over some queries; NaN: unknown
 *   28  u32  committed         rows that the unit has
 *   32  u32  n_selected        rows selected, whether or not they are in `ids`
 *   36  u32  n_estimated       rows that summaries stand for; with NONE, for some vector
 */
struct kv_wire_query_result {
    uint16_t layer;
    uint16_t kv_head;
    uint32_t n_ids;
    uint32_t n_scored_by_code;
    uint32_t n_scored_by_key;
    uint32_t n_reranked;
    uint32_t n_chapters;
    float recall;
    uint32_t committed;
    uint32_t n_selected;
    uint32_t n_estimated;
};
static_assert(sizeof(struct kv_wire_query_result) == 40, "as in the byte table");

#define KV_WIRE_ID_CACHED 0x80000000u /* more than any token: KV_TOKENS_MAX */

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "kv_wire.h: fields are used in place, which needs a little-endian machine"
#endif

/* Returns the seed of a row's CRC.  It depends on the row's place and writer, so a correct row
 * in the wrong place, or of another session, fails its check.  `writer` is the 64 bits that
 * were drawn for the session that wrote the row (kvserver/base/writers.h).
 *
 * The step is odd, so two tokens of one unit never share a seed, nor do two units of one writer
 * at one token.  Two writers share a seed by chance: 1 in 2^32.
 *
 * A CRC is linear: the CRC of the same bytes under another seed is the old one xor a constant
 * that depends on the two seeds and the length alone. */
#define KV_ROW_SEED_STEP 0x85ebca6bu

static inline uint32_t
kv_row_seed(uint64_t writer, uint32_t layer, uint32_t kv_head, uint32_t token)
{
    uint32_t unit = (layer << 16 | kv_head) * 0x9e3779b1u;
    uint32_t session = (uint32_t)((writer ^ writer >> 32) * 0x9e3779b97f4a7c15u >> 32);

    return (unit ^ unit >> 15 ^ session) + token * KV_ROW_SEED_STEP;
}

/* Returns a hash of a block's row CRCs in one unit.  It distinguishes blocks with the same
 * number and different rows.
 *   crcs  (KV_BLOCK_TOKENS) */
static inline uint32_t kv_wire_block_fingerprint(const uint32_t *crcs)
{
    const uint64_t odd = 0xff51afd7ed558ccdu;
    uint64_t lanes[4] = {1, 2, 3, 4}, hash = 0;

    /* Four chains: a multiplication has more latency than the CPU needs between two of them. */
    for (int i = 0; i < KV_BLOCK_TOKENS; i++)
        lanes[i % 4] = (lanes[i % 4] ^ crcs[i]) * odd;
    for (int i = 0; i < 4; i++)
        hash = (hash ^ lanes[i] ^ lanes[i] >> 32) * odd;
    return (uint32_t)(hash >> 32);
}

#ifdef __cplusplus
}
#endif
#endif
