/* Lists become maps, wrong ones are refused in words, and the epoch depends on the members and
 * on nothing else. */
#include "kvserver/cluster/members.h"
#include "proto/kv_types.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct kv_members *get(const char *text)
{
    struct kv_members *map = NULL;
    char detail[600] = "";

    if (kv_members_static.get("nodes", text, &map, detail, sizeof(detail)) != KV_OK)
        fail_msg("%s", detail);
    return map;
}

static void lists_are_read(void **state)
{
    struct kv_members *map = get("a=host:1,[::1]:2,b=loopback:3");

    (void)state;
    assert_int_equal(map->n_members, 3);
    assert_string_equal(map->members[0].name, "a");
    assert_string_equal(map->members[0].address, "host:1");
    assert_string_equal(map->members[1].name, "");
    assert_string_equal(map->members[1].address, "[::1]:2");
    assert_string_equal(map->members[2].name, "b");
    assert_string_equal(map->members[2].address, "loopback:3");
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(map->members[i].weight, 1);
    free(map);
}

static void names_are_ids(void **state)
{
    struct kv_members *map = get("a=host:1,host:2"), *other = get("host:2,a=elsewhere:1"),
                      *less = get("host:2"), *more = get("a=host:1,host:2,c:3");

    (void)state;
    assert_true(map->members[0].id == other->members[1].id);
    assert_true(map->members[1].id == other->members[0].id);
    assert_true(map->epoch == other->epoch);
    assert_true(map->epoch != 0 && less->epoch != 0);
    assert_true(map->epoch != less->epoch && map->epoch != more->epoch);
    free(map);
    free(other);
    free(less);
    free(more);
}

static void weights_count(void **state)
{
    struct kv_member members[] = {{.address = "a:1", .weight = 1},
                                  {.address = "b:1", .weight = 2}};
    struct kv_members *map = NULL, *same = NULL;
    char detail[600] = "";

    (void)state;
    assert_int_equal(kv_members_create("nodes", members, 2, &map, detail, sizeof(detail)),
                     KV_OK);
    members[1].weight = 0;
    assert_int_equal(kv_members_create("nodes", members, 2, &same, detail, sizeof(detail)),
                     KV_OK);
    assert_true(map->epoch != same->epoch);
    free(same);
    same = get("a:1,b:1");
    members[1].weight = 1;
    free(map);
    assert_int_equal(kv_members_create("nodes", members, 2, &map, detail, sizeof(detail)),
                     KV_OK);
    assert_true(map->epoch == same->epoch);
    free(map);
    free(same);
    members[1].weight = KV_MEMBER_WEIGHT_MAX + 1;
    assert_int_equal(kv_members_create("nodes", members, 2, &map, detail, sizeof(detail)),
                     KV_INVALID);
    assert_non_null(strstr(detail, "weight"));
}

static void refused(const char *text, const char *why)
{
    struct kv_members *map = NULL;
    char detail[600] = "";

    assert_int_equal(kv_members_static.get("nodes", text, &map, detail, sizeof(detail)),
                     KV_INVALID);
    assert_null(map);
    assert_string_equal(detail, why);
}

static void wrong_lists(void **state)
{
    static const char blank_name[] = "nodes: name: a blank or a control character in it",
                      blank_address[] = "nodes: address: a blank or a control character in it";
    char *many = malloc((KV_NODES_MAX + 1) * 10), *at = many;

    (void)state;
    refused("", "nodes: not HOST:PORT: an empty address");
    refused("a:1,", "nodes: not HOST:PORT: an empty address");
    refused("a:1,,b:1", "nodes: not HOST:PORT: an empty address");
    refused("a=", "nodes: not HOST:PORT: an empty address");
    refused("a:1,b", "nodes: not HOST:PORT: b");
    refused("a:1,x=b", "nodes: not HOST:PORT: b");
    refused("a:1,b:1,a:1", "nodes: twice in the list: a:1");
    refused("x=a:1,y=a:1", "nodes: twice in the list: a:1");
    refused("x=a:1,x=b:1", "nodes: twice in the list: x: a:1 and b:1");
    refused("b:1=a:1,b:1", "nodes: twice in the list: b:1: a:1 and b:1"); /* the same id */
    refused("=a:1", "nodes: not HOST:PORT: =a:1");
    refused("x==a:1", "nodes: not HOST:PORT: =a:1");
    refused("a:1, b:1", blank_address);
    refused("a:1 ,b:1", blank_address);
    refused("x =a:1", blank_name);
    refused("x=a:1\n", blank_address);
    refused("\x1b[2J=a:1", blank_name);
    refused("\xc2\x9b"
            "2J=a:1",
            blank_name);
    refused("x=a\xc2\x80:1", blank_address);
    free(get("\xc2\xa7\xc3\x80=a:1"));

    assert_non_null(many);
    for (unsigned i = 0; i <= KV_NODES_MAX; i++)
        at += sprintf(at, "%sn%u:1", i > 0 ? "," : "", i);
    refused(many, "nodes: too many nodes: limit 1024");
    *strrchr(many, ',') = '\0';
    free(get(many));
    free(many);
}

/* Names that no node can have. */
static void long_names(void **state)
{
    char name[KV_NAME_BYTES_MAX + 2];
    struct kv_member member = {.name = name, .address = "a:1"};
    struct kv_members *map = NULL;
    char detail[600] = "";

    (void)state;
    memset(name, 'n', sizeof(name));
    name[KV_NAME_BYTES_MAX + 1] = '\0';
    assert_int_equal(kv_members_create("nodes", &member, 1, &map, detail, sizeof(detail)),
                     KV_INVALID);
    assert_string_equal(detail, "nodes: name: nnnnnnnnnnnnnnnnnnnn...: more than 255 bytes");
    name[KV_NAME_BYTES_MAX] = '\0';
    assert_int_equal(kv_members_create("nodes", &member, 1, &map, detail, sizeof(detail)),
                     KV_OK);
    free(map);
}

static void no_members(void **state)
{
    struct kv_members *map = NULL;
    char detail[600] = "";

    (void)state;
    assert_int_equal(kv_members_create("nodes", NULL, 0, &map, detail, sizeof(detail)),
                     KV_INVALID);
    assert_string_equal(detail, "nodes: no nodes");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lists_are_read), cmocka_unit_test(names_are_ids),
        cmocka_unit_test(weights_count),  cmocka_unit_test(wrong_lists),
        cmocka_unit_test(long_names),     cmocka_unit_test(no_members),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
