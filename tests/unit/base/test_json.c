/* What is written is JSON whatever the strings hold, and what comes out is what went in. */
#include "kvserver/base/json.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

struct written {
    struct kv_json json;
    FILE *out;
    char *text;
    size_t bytes;
};

static void begin(struct written *written)
{
    written->out = open_memstream(&written->text, &written->bytes);
    assert_non_null(written->out);
    kv_json_begin(&written->json, written->out);
}

static void end(struct written *written, const char *expected)
{
    kv_json_end(&written->json);
    fclose(written->out);
    assert_string_equal(written->text, expected);
    free(written->text);
}

static void members_are_separated(void **state)
{
    struct written written;

    (void)state;
    begin(&written);
    end(&written, "{}\n");
    begin(&written);
    kv_json_text(&written.json, "a", "b");
    kv_json_number(&written.json, "n", 3);
    kv_json_bool(&written.json, "yes", true);
    kv_json_bool(&written.json, "no", false);
    end(&written, "{\"a\": \"b\", \"n\": 3, \"yes\": true, \"no\": false}\n");
}

static void strings_are_escaped(void **state)
{
    struct written written;

    (void)state;
    begin(&written);
    kv_json_text(&written.json, "quote \" back \\", "line\nbell\x07 del\x7f");
    kv_json_text(&written.json, "utf", "\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80");
    end(&written, "{\"quote \\\" back \\\\\": \"line\\u000abell\\u0007 del\\u007f\", "
                  "\"utf\": \"\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80\"}\n");
}

/* Broken, overlong, cut short, half of a pair, too large: each bad byte becomes U+FFFD. */
static void bytes_that_are_no_text(void **state)
{
    static const char *const bad[] = {
        "\xff",
        "\x80",
        "\xc0\xaf",
        "\xc3",
        "\xe2\x82",
        "\xe0\x80\x80",
        "\xed\xa0\x80",
        "\xf0\x80\x80\x80",
        "\xf4\x90\x80\x80",
        "\xf5\x80\x80\x80",
    };

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct written written;
        char expected[128] = "{\"x\": \"";

        for (size_t j = 0; j < strlen(bad[i]); j++)
            strcat(expected, "\\ufffd");
        strcat(expected, "\"}\n");
        begin(&written);
        kv_json_text(&written.json, "x", bad[i]);
        end(&written, expected);
    }
}

static void numbers(void **state)
{
    struct written written;

    (void)state;
    begin(&written);
    kv_json_number(&written.json, "zero", 0);
    kv_json_number(&written.json, "large", 1099511627776.0);
    kv_json_number(&written.json, "minus", -7);
    kv_json_number(&written.json, "half", 0.5);
    kv_json_number(&written.json, "nan", NAN);
    kv_json_number(&written.json, "inf", INFINITY);
    end(&written, "{\"zero\": 0, \"large\": 1099511627776, \"minus\": -7, \"half\": 0.5, "
                  "\"nan\": null, \"inf\": null}\n");
}

static void lists(void **state)
{
    struct written written;

    (void)state;
    begin(&written);
    kv_json_list(&written.json, "none");
    kv_json_list_end(&written.json);
    kv_json_list(&written.json, "ids");
    kv_json_item_number(&written.json, 1);
    kv_json_item_number(&written.json, 0.5);
    kv_json_list_end(&written.json);
    kv_json_list(&written.json, "nodes");
    for (unsigned i = 0; i < 2; i++) {
        kv_json_item(&written.json);
        kv_json_text(&written.json, "node", "a");
        kv_json_number(&written.json, "rows", i);
        kv_json_item_end(&written.json);
    }
    kv_json_list_end(&written.json);
    kv_json_bool(&written.json, "last", true);
    end(&written,
        "{\"none\": [], \"ids\": [1, 0.5], \"nodes\": [{\"node\": \"a\", \"rows\": 0}, "
        "{\"node\": \"a\", \"rows\": 1}], \"last\": true}\n");
}

static void objects(void **state)
{
    struct written written;

    (void)state;
    begin(&written);
    kv_json_object(&written.json, "none");
    kv_json_object_end(&written.json);
    kv_json_object(&written.json, "args");
    kv_json_number(&written.json, "layer", 3);
    kv_json_object(&written.json, "deep");
    kv_json_text(&written.json, "a", "b");
    kv_json_object_end(&written.json);
    kv_json_number(&written.json, "rows", 7);
    kv_json_object_end(&written.json);
    kv_json_number(&written.json, "last", 1);
    end(&written, "{\"none\": {}, \"args\": {\"layer\": 3, \"deep\": {\"a\": \"b\"}, "
                  "\"rows\": 7}, \"last\": 1}\n");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(members_are_separated),
        cmocka_unit_test(strings_are_escaped),
        cmocka_unit_test(bytes_that_are_no_text),
        cmocka_unit_test(numbers),
        cmocka_unit_test(lists),
        cmocka_unit_test(objects),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
