#include "node_look.h"

#include "../../kvserver/store/control.h"

/* Records of segments stay with the heap once they were carved: whole pages of them. */
static uint64_t record_bytes(const struct kv_heap *heap)
{
    uint64_t n_free = 0, n_per_element = (16 << 10) / sizeof(struct kv_segment);
    uint64_t n_per_page = KV_ARENA_PAGE / (16 << 10);

    for (const struct kv_segment *record = heap->free_records; record != NULL;
         record = (const struct kv_segment *)(const void *)record->rows)
        n_free++;
    n_free += heap->n_segments;
    return (n_free / n_per_element + n_per_page - 1) / n_per_page * KV_ARENA_PAGE;
}

void node_look(struct kv_node *node, struct node_look *ret_look)
{
    struct node_look look = {.sessions = node->n_sessions, .calls = node->n_calls};

    for (uint32_t i = 0; i < node->config.clients_max; i++)
        look.clients += node->clients[i].state != KV_CLIENT_FREE;
    for (uint32_t i = 0; i < node->n_threads; i++) {
        const struct kv_data *data = &node->data[i];
        uint64_t lent = kv_arena_bytes_lent(data->arena);
        uint64_t records = record_bytes(&data->heap);

        look.works += kv_pool_lent(data->works);
        look.bodies += kv_pool_lent(data->bodies);
        look.stagings += kv_pool_lent(data->stagings);
        look.segments += data->heap.n_segments;
        look.objects += kv_map_count(data->objects.map);
        look.object_bytes += data->objects.bytes;
        look.bytes_strayed += lent > records ? lent - records : 0;
        look.corrupt_rows += kv_counted(&data->stats.corrupt_rows);
        look.bad_messages += kv_counted(&data->stats.bad_messages);
    }
    *ret_look = look;
}
