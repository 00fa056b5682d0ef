/* put_get.c - objects: stores bytes under names, reads them and deletes them.
 *
 * For programs that have keys and blobs, but no model and no tokens.  Build it against the
 * installed library with
 *
 *     cc put_get.c $(pkg-config --cflags --libs topkv) -o put_get
 *
 * and run it with the nodes: ./put_get 127.0.0.1:7400
 */
#include <kvclient.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    N_OBJECTS = 8,
    OBJECT_BYTES = 1 << 20,
};

/* Prints the failure.  The library's detail names the node, the operation and the reason. */
static void failed(const struct kv_client *client, const char *what)
{
    fprintf(stderr, "put_get: %s: %s\n", what, kv_client_detail(client));
}

/* Runs one operation on all eight objects and waits for its end.  Every operation is started,
 * then finished; between the two, a program can compute and call kv_poll() now and then. */
static kv_status_t
run(struct kv_client *client, enum kv_object_verb verb, struct kv_object *objects)
{
    struct kv_op *op;
    kv_status_t status = kv_objects_begin(client, verb, objects, N_OBJECTS, 0, &op);

    return status == KV_OK ? kv_finish(op) : status;
}

int main(int argc, char **argv)
{
    const struct kv_client_options options = {
        .nodes = argc > 1 ? argv[1] : "127.0.0.1:7400",
        .name = "put_get",
    };
    struct kv_object objects[N_OBJECTS];
    struct kv_buffer *from, *to;
    struct kv_client *client;
    char names[N_OBJECTS][32];
    char detail[512];
    kv_status_t status;
    int result = EXIT_FAILURE;

    if (kv_client_open(&options, &client, detail, sizeof(detail)) != KV_OK) {
        fprintf(stderr, "put_get: %s\n", detail);
        return EXIT_FAILURE;
    }

    /* Bytes are sent from, and received into, memory that is registered with the transports. */
    if (kv_buffer_alloc(client, (size_t)N_OBJECTS * OBJECT_BYTES, &from) != KV_OK ||
        kv_buffer_alloc(client, (size_t)N_OBJECTS * OBJECT_BYTES, &to) != KV_OK) {
        failed(client, "buffer");
        goto out;
    }
    for (size_t i = 0; i < (size_t)N_OBJECTS * OBJECT_BYTES; i++)
        ((unsigned char *)kv_buffer_data(from))[i] = (unsigned char)(i * 2654435761u >> 24);

    for (unsigned i = 0; i < N_OBJECTS; i++) {
        snprintf(names[i], sizeof(names[i]), "example/put_get/%u", i);
        objects[i] = (struct kv_object){
            .name = names[i],
            .buffer = from,
            .offset = (size_t)i * OBJECT_BYTES,
            .bytes = OBJECT_BYTES,
        };
    }
    /* Names are spread over the nodes and over each node's data threads.  A put may be
     * repeated: the same bytes under the same name are not a conflict. */
    status = run(client, KV_OBJECT_PUT, objects);
    if (status != KV_OK) {
        failed(client, "put");
        goto out;
    }

    /* For a get, `bytes` is the capacity; after it, the object's size. */
    for (unsigned i = 0; i < N_OBJECTS; i++)
        objects[i].buffer = to;
    status = run(client, KV_OBJECT_GET, objects);
    if (status != KV_OK) {
        failed(client, "get");
        goto out;
    }
    /* The library has already checked every byte against its writer's checksum; this only shows
     * it. */
    if (memcmp(kv_buffer_data(from), kv_buffer_data(to), (size_t)N_OBJECTS * OBJECT_BYTES) !=
        0) {
        fprintf(stderr, "put_get: other bytes came back\n");
        goto out;
    }

    status = run(client, KV_OBJECT_DELETE, objects);
    if (status != KV_OK) {
        failed(client, "delete");
        goto out;
    }
    /* Each object has its own status; the operation has the first one that is not KV_OK. */
    status = run(client, KV_OBJECT_EXISTS, objects);
    if (status != KV_NOT_FOUND || objects[0].status != KV_NOT_FOUND) {
        failed(client, "exists");
        goto out;
    }
    printf("put_get: %d objects of %d bytes: stored, fetched, compared, deleted\n", N_OBJECTS,
           OBJECT_BYTES);
    result = EXIT_SUCCESS;

out:
    kv_client_close(client); /* frees the buffers, too */
    return result;
}
