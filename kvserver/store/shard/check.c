/* check.c - whether a data thread's books are right; shard.h numbers what is asserted here. */
#include "kvserver/store/index/builder.h"
#include "kvserver/store/shard/shard_private.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* ---- lists and pools --------------------------------------------------------------------- */

/* What the requests of all clients hold. */
struct held {
    uint32_t n_requests, n_bodies, n_stagings, n_receives, n_reply_batches;
    uint64_t credits;
    uint64_t n_at_work[2];
    uint32_t n_linked, n_met; /* requests that say they are in a list; found in one */
};

/* The length of a list; every link back is the reverse of the link forward. */
static uint32_t check_links(const struct kvs_shard *shard,
                            struct kvs_request *const *list,
                            const struct kvs_request_queue *queue,
                            struct kvs_request *const **ret_end)
{
    uint32_t n = 0;

    for (; *list != NULL; list = &(*list)->next) {
        assert((*list)->link == list && (*list)->queue == queue);
        n++;
        assert(n <= kv_pool_used(shard->requests)); /* no ring */
    }
    *ret_end = list;
    return n;
}

static uint32_t check_queue(const struct kvs_shard *shard,
                            const struct kvs_request_queue *queue)
{
    struct kvs_request *const *end;
    const uint32_t n = check_links(shard, &queue->first, queue, &end);

    assert(queue->end == end);
    return n;
}

static bool is_of_class(const struct kvs_request *request)
{
    const struct kvs_client_queue *queues = request->client->queues;
    const void *queue = request->queue;

    return queue >= (const void *)queues && queue < (const void *)(queues + KV_PRIORITY_COUNT);
}

/* Of the requests in one list, the first has all of them met. */
static void check_list_of(const struct kvs_request *request, struct held *held)
{
    const struct kvs_shard *shard = request->shard;
    struct kvs_request *const *end;

    if (request->link == NULL)
        return;
    held->n_linked++;
    if (request->queue == NULL) {
        assert(request->session != NULL && request->state == KVS_REQUEST_WAITING);
        if (request->link == &request->session->waiters)
            held->n_met += check_links(shard, &request->session->waiters, NULL, &end);
    } else if (request->queue->first == request) {
        held->n_met += check_queue(shard, request->queue);
    }
}

static bool is_loading(const struct kvs_request *request)
{
    const struct kvs_segment *segment = request->missing;

    /* What was given up is asked for again when it is the request's turn. */
    return request->session == NULL || kvs_segment_is_away(segment);
}

static void check_state(const struct kvs_request *request)
{
    const struct kvs_shard *shard = request->shard;
    const struct kvs_request_queue *queue = request->queue;

    switch (request->state) {
    case KVS_REQUEST_WAITING:
        assert(request->link != NULL &&
               (queue == NULL || queue == &shard->looking || queue == &shard->missing));
        assert(queue != &shard->missing || (request->at_work.turn == 0 && is_loading(request) &&
                                            (request->staging == NULL || request->received)));
        break;
    case KVS_REQUEST_QUEUED:
        assert(request->link != NULL && queue != NULL && queue != &shard->looking &&
               queue != &shard->missing);
        assert(!is_of_class(request) ||
               queue == &request->client->queues[kv_op_priority(request->header.op)].requests);
        assert(queue != &shard->staging_waiters || request->staging == NULL);
        break;
    case KVS_REQUEST_AWAIT_BULK:
    case KVS_REQUEST_RECEIVING:
    case KVS_REQUEST_SENDING:
        assert(request->link == NULL);
        break;
    case KVS_REQUEST_FREE:
    case KVS_REQUEST_BEGUN:
        assert(!"a request that nobody goes on with");
    }
    assert((request->n_sends > 0) == (request->state == KVS_REQUEST_SENDING));
}

static bool is_in_use(const struct kv_pool *pool, const void *object)
{
    return object == NULL || kv_pool_is_used(pool, kv_pool_index(pool, object));
}

static void check_request(const struct kvs_request *request, struct held *held)
{
    const struct kvs_shard *shard = request->shard;

    check_state(request);
    check_list_of(request, held);
    assert(request->client->due_us <= kvs_request_next_look(request) ||
           kvs_request_next_look(request) <= shard->now_us);
    assert(is_in_use(shard->requests, request) &&
           is_in_use(shard->bodies, request->body_slot) &&
           is_in_use(shard->bodies, request->reply_slot) &&
           is_in_use(shard->bodies, request->bulk_slot) &&
           is_in_use(shard->stagings, request->staging));
    assert(!request->deferred ||
           (!request->received &&
            (request->state == KVS_REQUEST_WAITING || request->state == KVS_REQUEST_QUEUED)));
    assert(request->incoming == NULL || request->deferred);
    assert(request->n_iov <= KV_IOV_MAX && request->n_pins <= KVS_PINS_MAX);
    for (unsigned i = 0; i < request->n_pins; i++)
        assert(request->pins[i]->pins > 0);
    assert(request->object == NULL || request->object->pins > 0);
    if (request->at_work.turn != 0)
        held->n_at_work[request->at_work.turn - 1]++;
    assert(request->session == NULL ||
           request->session == &shard->sessions[request->session->index]);
}

/* A client's own counts against its requests. */
static void check_client(const struct kvs_shard *shard,
                         const struct kvs_shard_client *client,
                         struct held *held)
{
    struct kvs_request *const *link = &client->requests;
    uint32_t n_requests = 0, n_bodies = 0, n_stagings = 0, n_notes = 0;

    for (const struct kvs_request *request = client->requests; request != NULL;
         link = &request->client_next, request = request->client_next) {
        assert(request->client_link == link && request->client == client);
        assert(request->shard == shard);
        n_requests++;
        assert(n_requests <= client->n_requests);
        n_bodies += (request->body_slot != NULL) + (request->reply_slot != NULL) +
                    (request->bulk_slot != NULL);
        n_stagings += request->staging != NULL;
        check_request(request, held);
    }
    for (unsigned i = 0; i < KVS_NOTES; i++)
        n_notes += client->notes[i].busy;
    assert(client->n_requests == n_requests && client->n_notes == n_notes);
    assert(client->n_bodies == n_bodies && client->n_stagings == n_stagings);
    assert(n_bodies <= KVS_BODIES_CLIENT && n_stagings <= KVS_STAGINGS_CLIENT);
    assert(client->n_pending_receives <= KVS_PENDING_RECEIVES_CLIENT);
    assert(client->n_reply_batches <= KVS_REPLY_BATCHES_CLIENT);
    assert(atomic_load_explicit(&client->in_flight, memory_order_relaxed) == n_requests);
    assert((client->channel != NULL) == (client->state == KVS_SHARD_CLIENT_OPEN));
    for (size_t i = 0; i < sizeof(client->early_bulk) / sizeof(client->early_bulk[0]); i++)
        assert(client->early_bulk[i].incoming == NULL || client->channel != NULL);
    held->n_requests += n_requests;
    held->n_bodies += n_bodies;
    held->n_stagings += n_stagings;
    held->n_reply_batches += client->n_reply_batches;
    if (client->state == KVS_SHARD_CLIENT_FREE) {
        assert(n_requests == 0 && n_notes == 0 && client->n_pending_receives == 0);
        return;
    }
    assert(client == &shard->clients[client->index]);
    assert(n_requests <= client->credits);
    held->credits += client->credits;
}

/* Requests whose bodies are still coming. */
static void check_receives(const struct kvs_shard *shard, struct held *held)
{
    uint32_t n_of_clients = 0;

    for (uint32_t i = 0; i < KVS_PENDING_RECEIVES; i++) {
        const struct kvs_pending_receive *receive = kv_pool_at(shard->pending_receives, i);

        assert((receive->client != NULL) == kv_pool_is_used(shard->pending_receives, i));
        if (receive->client == NULL)
            continue;
        assert(receive->client->n_pending_receives > 0);
        assert(is_in_use(shard->bodies, receive->body));
        held->n_receives++;
    }
    for (uint32_t i = 0; i < shard->n_clients; i++)
        n_of_clients += shard->clients[i].n_pending_receives;
    assert(held->n_receives == n_of_clients);
}

static uint32_t check_woken(const struct kvs_shard *shard)
{
    struct kvs_shard_session *const *end = &shard->woken;
    uint32_t n = 0;

    for (; *end != NULL; end = &(*end)->woken_next) {
        n++;
        assert((*end)->is_woken && n <= shard->n_sessions);
    }
    assert(shard->woken_end == end);
    return n;
}

static void check_classes(const struct kvs_shard *shard)
{
    for (int i = 0; i < KV_PRIORITY_COUNT; i++) {
        const struct kvs_request_class *class = &shard->classes[i];
        struct kvs_client_queue *const *link = &class->first;
        uint32_t n_listed = 0, n_clients = 0;

        for (; *link != NULL; link = &(*link)->next) {
            assert((*link)->link == link && (*link)->requests.first != NULL);
            assert(++n_listed <= shard->n_clients);
        }
        assert(class->end == link);
        for (uint32_t j = 0; j < shard->n_clients; j++) {
            const struct kvs_client_queue *queue = &shard->clients[j].queues[i];

            (void)check_queue(shard, &queue->requests);
            assert((queue->link != NULL) == (queue->requests.first != NULL));
            n_clients += queue->link != NULL;
        }
        assert(n_listed == n_clients);
    }
}

static void check_due(const struct kvs_shard *shard)
{
    for (uint32_t i = 0; i < shard->n_clients; i++) {
        assert(shard->due[i]->due_at == i);
        assert(i == 0 || shard->due[(i - 1) / 2]->due_us <= shard->due[i]->due_us);
    }
}

void kvs_shard_check(const struct kvs_shard *shard)
{
    struct held held = {0};

    check_due(shard);
    for (uint32_t i = 0; i < shard->n_clients; i++)
        check_client(shard, &shard->clients[i], &held);
    check_receives(shard, &held);
    (void)check_woken(shard);
    assert(held.n_linked == held.n_met);
    check_classes(shard);
    (void)check_queue(shard, &shard->looking);
    (void)check_queue(shard, &shard->missing);
    (void)check_queue(shard, &shard->staging_waiters);

    assert(held.n_requests == kv_pool_used(shard->requests));
    assert(held.n_reply_batches == kv_pool_used(shard->reply_batches));
    assert(held.n_bodies + held.n_receives == kv_pool_used(shard->bodies));
    assert(held.n_stagings == kv_pool_used(shard->stagings));
    assert(held.n_at_work[0] == shard->store.n_at_work[0] &&
           held.n_at_work[1] == shard->store.n_at_work[1]);
    assert(held.n_receives == kv_pool_used(shard->pending_receives));
    assert(held.credits <= kv_pool_size(shard->requests));
    assert(kvs_counted(&shard->stats.in_flight) == held.n_requests);
}

/* ---- sessions ---------------------------------------------------------------------------- */

static void check_unit_place(const struct kvs_shard_session *session, uint32_t at)
{
    const struct kvs_unit *unit = &session->units[at];

    assert(kvs_shard_session_unit(session, unit->layer, unit->kv_head) == unit);
    assert(unit->writers == &session->writers && unit->session == session->index);
    assert(unit->row_bytes == session->schema->layers[unit->layer].row_bytes);
    assert(unit->reserved <= session->tokens_max);
    assert(unit->reserved == unit->committed || unit->n_transfers > 0);
}

static void check_session(const struct kvs_shard_session *session)
{
    uint32_t n_here = 0;

    for (uint32_t i = 0; i < session->n_units; i++)
        kvs_unit_check(&session->units[i]);
    if (!session->used)
        return;
    assert(session->schema != NULL && session->writers != NULL);
    for (uint32_t i = 0; i < session->schema->n_units; i++)
        if (session->unit_of[i] != UINT16_MAX)
            assert(session->unit_of[i] == n_here++);
    assert(n_here == session->n_units);
    if (session->n_units > 0)
        kvs_blocks_check(&session->blocks);
    for (uint32_t i = 0; i < session->n_units; i++)
        check_unit_place(session, i);
}

/* Transfers and puts to come of a session's units are those of its requests. */
struct writes {
    uint64_t n_transfers, n_coming;
};

static void check_writes(const struct kvs_shard *shard)
{
    struct writes *all = calloc(shard->n_sessions, sizeof(*all));

    if (all == NULL)
        return;
    for (uint32_t i = 0; i < shard->n_clients; i++) {
        for (const struct kvs_request *request = shard->clients[i].requests; request != NULL;
             request = request->client_next) {
            if (request->session == NULL || kvs_request_stale(request))
                continue;
            struct writes *writes = &all[request->session->index];
            writes->n_transfers += request->transfer ? request->header.n_units : 0;
            writes->n_coming += request->coming ? request->header.n_units : 0;
        }
    }
    for (uint32_t i = 0; i < shard->n_sessions; i++) {
        const struct kvs_shard_session *session = &shard->sessions[i];

        for (uint32_t j = 0; session->used && j < session->n_units; j++) {
            assert(all[i].n_transfers >= session->units[j].n_transfers);
            assert(all[i].n_coming >= session->units[j].n_coming);
            all[i].n_transfers -= session->units[j].n_transfers;
            all[i].n_coming -= session->units[j].n_coming;
        }
        assert(!session->used || (all[i].n_transfers == 0 && all[i].n_coming == 0));
    }
    free(all);
}

/* A session that is not in use has units only while a command is at it. */
static void check_sessions(const struct kvs_shard *shard)
{
    const struct kvs_command *command = shard->command;
    uint32_t n_woken = 0;

    for (uint32_t i = 0; i < shard->n_sessions; i++) {
        const struct kvs_shard_session *session = &shard->sessions[i];

        assert(session->index == i);
        assert(session->used || session->n_units == 0 ||
               (command != NULL && (command->index == i || command->child_index == i)));
        check_session(session);
        n_woken += session->is_woken;
    }
    assert(n_woken == check_woken(shard));
    check_writes(shard);
}

/* ---- who has which block, and which codebook --------------------------------------------- */

struct found {
    const struct kvs_block *block;
    uint32_t refs, pins;
};

/* Everything that refers to a block, counted anew. */
struct census {
    const struct kvs_shard *shard;
    struct kv_map *map;  /* from a block's address to its place in `found` */
    struct found *found; /* (n_blocks of the store) */
    uint32_t *book_refs; /* (KVS_CODEBOOKS_MAX) */
    uint32_t *book_holes;
    uint64_t n;
    bool is_full; /* no memory for the map: nothing is known */
};

static struct found *find(struct census *census, const struct kvs_block *block)
{
    static struct found nobody;
    struct kv_id128 key = {0};

    memcpy(key.bytes, &block, sizeof(block));
    struct found *found = kv_map_get(census->map, &key);
    if (found != NULL)
        return found;
    assert(census->n < census->shard->store.n_blocks);
    found = &census->found[census->n];
    if (!kv_map_set(census->map, &key, found)) {
        census->is_full = true;
        return &nobody;
    }
    census->n++;
    found->block = block;
    if (block->under != NULL)
        find(census, block->under)->refs++;
    return found;
}

static void count_job(void *arg, const struct kvs_index_job_look *look)
{
    struct census *census = arg;

    for (uint32_t i = 0; i < look->n_blocks && !census->is_full; i++)
        find(census, look->blocks[i])->pins++;
    if (look->before != NULL && !census->is_full)
        find(census, look->before)->pins++;
    if (look->has_codebook)
        census->book_refs[look->codebook]++;
}

static void count_pin(void *arg, const struct kvs_block *block)
{
    struct census *census = arg;

    if (!census->is_full)
        find(census, block)->pins++;
}

static void count_kept(void *arg, const struct kvs_block *block)
{
    struct census *census = arg;

    if (!census->is_full)
        find(census, block)->refs++;
}

static void count_all(struct census *census, const struct kvs_kept_blocks *kept)
{
    const struct kvs_shard *shard = census->shard;

    for (uint32_t i = 0; i < shard->n_sessions; i++)
        for (uint32_t j = 0; j < shard->sessions[i].blocks.n && !census->is_full; j++)
            find(census, shard->sessions[i].blocks.list[j])->refs++;
    for (uint32_t i = 0; i < shard->n_clients; i++)
        for (const struct kvs_request *request = shard->clients[i].requests; request != NULL;
             request = request->client_next)
            for (unsigned j = 0; j < request->n_pins && !census->is_full; j++)
                find(census, request->pins[j])->pins++;
    kvs_indexer_visit(shard->indexer, count_job, census);
    if (shard->tier != NULL)
        kvs_disk_tier_visit_pins(shard->tier, count_pin, census);
    if (kept != NULL)
        kept->each(kept->arg, shard->index, count_kept, census);
}

static void check_counts(struct census *census)
{
    const struct kvs_shard *shard = census->shard;
    uint64_t n_bad = 0, n_segments = 0, n_bytes = 0, n_marked = 0, n_away = 0;

    assert(census->n == shard->store.n_blocks);
    for (uint64_t i = 0; i < census->n; i++) {
        const struct found *found = &census->found[i];
        const struct kvs_block *block = found->block;

        kvs_block_check(&shard->store, block);
        assert(block->refs == found->refs && block->pins == found->pins);
        n_segments += block->n_own;
        n_bytes += kvs_block_record_bytes(block);
        n_away += block->residency != KVS_IN_MEMORY;
        for (uint32_t at = 0; at < block->n_segments; at++) {
            const struct kvs_codes *codes = kvs_block_codes(block, at);

            n_bad += kvs_segment_count_bad(&shard->store, block, at);
            n_marked += block->segments[at].has_bad;
            if (codes->column.bytes == NULL)
                continue;
            census->book_refs[codes->codebook]++;
            census->book_holes[codes->codebook] += codes->lost_chapter;
        }
    }
    assert(n_segments == shard->store.n_segments && n_away == shard->store.n_away);
    assert(n_bad == shard->store.health.rows_bad);
    kvs_segment_store_check_used(&shard->store, n_bytes, n_marked);
    for (uint32_t i = 0; i < KVS_CODEBOOKS_MAX; i++) {
        const struct kvs_codebook *book = kvs_codebook_at(&shard->codebooks, i);

        if (kv_pool_is_used(shard->codebooks.pool, i))
            assert(book->refs == census->book_refs[i] &&
                   book->n_holes == census->book_holes[i]);
        else
            assert(census->book_refs[i] == 0);
    }
}

static void check_owners(const struct kvs_shard *shard, const struct kvs_kept_blocks *kept)
{
    struct census census = {.shard = shard, .map = kv_map_create(1)};

    census.found = calloc(shard->store.n_blocks + 1, sizeof(*census.found));
    census.book_refs = calloc(KVS_CODEBOOKS_MAX, sizeof(*census.book_refs));
    census.book_holes = calloc(KVS_CODEBOOKS_MAX, sizeof(*census.book_holes));
    if (census.map != NULL && census.found != NULL && census.book_refs != NULL &&
        census.book_holes != NULL) {
        count_all(&census, kept);
        if (!census.is_full)
            check_counts(&census);
    }
    kv_map_destroy(census.map);
    free(census.found);
    free(census.book_refs);
    free(census.book_holes);
}

void kvs_shard_check_memory(const struct kvs_shard *shard, const struct kvs_kept_blocks *kept)
{
    struct kv_pool *const pools[] = {shard->requests,         shard->middles,
                                     shard->bodies,           shard->stagings,
                                     shard->pending_receives, shard->reply_batches};

    for (size_t i = 0; i < sizeof(pools) / sizeof(pools[0]); i++)
        kv_pool_check(pools[i]);
    kv_map_check(shard->objects.map);
    kvs_arena_check(shard->arena);
    kvs_segment_store_check(&shard->store);
    kvs_objects_check(&shard->objects);
    kvs_codebooks_check(&shard->codebooks);
    kvs_indexer_check(shard->indexer);
    check_sessions(shard);
    check_owners(shard, kept);
}
