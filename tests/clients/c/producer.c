/* A producer in C: hiredis and msgpack-c. REDIS_URL is the address of Redis; its password is not percent-decoded. */
#include <hiredis/hiredis.h>
#include <msgpack.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define REQUESTS 200

static redisContext *redis;

static void fail(const char *what) {
    fprintf(stderr, "%s\n", what);
    exit(1);
}

static redisReply *checked(void *reply) {
    if (reply == NULL) fail(redis->errstr);
    if (((redisReply *)reply)->type == REDIS_REPLY_ERROR) fail(((redisReply *)reply)->str);
    return reply;
}

/* Runs a command and returns its reply. This short program does not free replies. */
#define command(...) checked(redisCommand(redis, __VA_ARGS__))

static void connect_to(const char *url) {
    char user[64] = "", password[256] = "", host[256];
    int port, parts = strchr(url, '@')
                          ? sscanf(url, "redis://%63[^:]:%255[^@]@%255[^:]:%d", user, password, host, &port)
                          : sscanf(url, "redis://%255[^:]:%d", host, &port);
    if (parts != 4 && parts != 2)
        fail("REDIS_URL is redis://user:password@host:port/0, or without user and password");
    redis = redisConnect(host, port);
    if (redis == NULL || redis->err) fail(redis ? redis->errstr : "out of memory");
    if (*password) command("AUTH %s %s", user, password);
}

/* Waits for a result. BLPOP returns the key and the value. */
static redisReply *result(const char *model, const char *id) {
    redisReply *reply = command("BLPOP carpool:{%s}:result:%s 10", model, id);
    if (reply->type != REDIS_REPLY_ARRAY) fail("no result came");
    return reply->element[1];
}

static msgpack_object unpacked(const char *data, size_t length) {
    static msgpack_zone zone; /* unpacked objects live until the program ends */
    msgpack_object object;
    if (zone.chunk_size == 0) msgpack_zone_init(&zone, MSGPACK_ZONE_CHUNK_SIZE);
    if (msgpack_unpack(data, length, NULL, &zone, &object) != MSGPACK_UNPACK_SUCCESS) fail("this is not msgpack");
    return object;
}

static msgpack_object field(msgpack_object map, const char *name) {
    for (uint32_t n = 0; map.type == MSGPACK_OBJECT_MAP && n < map.via.map.size; n++) {
        msgpack_object_kv pair = map.via.map.ptr[n];
        if (pair.key.via.str.size == strlen(name) && !memcmp(pair.key.via.str.ptr, name, strlen(name)))
            return pair.val;
    }
    fprintf(stderr, "%s: ", name);
    fail("no such field");
    abort();
}

/* Strings and bytes are both printed by their length. */
#define TEXT(object) (int)(object).via.str.size, (object).via.str.ptr

int main(void) {
    connect_to(getenv("REDIS_URL"));

    /* 1. One request. Its correlation ID is the entry ID, which XADD returns. */
    const char *id = command("XADD carpool:{square}:requests * body 7")->str;
    printf("{\"step\":\"json\",\"id\":\"%s\",\"envelope\":%s}\n", id, result("square", id)->str);

    /* 2. A tensor, in and out. In msgpack 83 is a map of three, a0 + n a string of n bytes, 92 a list of two,
          c4 n are n bytes. */
    const char matrix[] = "\x83\xa8" "datatype\xa5INT16\xa5shape\x92\x02\x03\xa4" "data\xc4\x0c"
                          "\1\0\2\0\3\0\4\0\5\0\6";
    id = command("XADD carpool:{transpose}:requests * content_type application/msgpack body %b", matrix,
                 sizeof matrix)->str;
    redisReply *reply = result("transpose", id);
    msgpack_object envelope = unpacked(reply->str, reply->len), status = field(envelope, "status");
    msgpack_object body = field(envelope, "body"), tensor = unpacked(body.via.bin.ptr, body.via.bin.size);
    msgpack_object datatype = field(tensor, "datatype"), data = field(tensor, "data");
    msgpack_object_array shape = field(tensor, "shape").via.array;
    printf("{\"step\":\"tensor\",\"id\":\"%s\",\"sent\":\"", id);
    for (size_t n = 0; n < sizeof matrix; n++) printf("%02x", (unsigned char)matrix[n]);
    printf("\",\"status\":\"%.*s\",\"datatype\":\"%.*s\",\"shape\":[", TEXT(status), TEXT(datatype));
    for (uint32_t n = 0; n < shape.size; n++) printf("%s%d", n ? "," : "", (int)shape.ptr[n].via.u64);
    printf("],\"values\":[");
    for (uint32_t n = 0; n < data.via.bin.size; n += 2)
        printf("%s%d", n ? "," : "", (int16_t)((unsigned char)data.via.bin.ptr[n] | data.via.bin.ptr[n + 1] << 8));
    printf("]}\n");

    /* 3. Two hundred requests in flight, and one stream of replies. Appended commands are sent together. */
    char name[64], last[64] = "0";
    snprintf(name, sizeof name, "c-%d", (int)getpid());
    for (int n = 0; n < REQUESTS; n++)
        redisAppendCommand(redis, "XADD carpool:{square}:requests * reply_to %s correlation_id %s:%d body %d", name,
                           name, n, n);
    for (int n = 0; n < REQUESTS; n++, freeReplyObject(checked(reply)))
        if (redisGetReply(redis, (void **)&reply) != REDIS_OK) fail(redis->errstr);
    printf("{\"step\":\"stream\",\"reply_to\":\"%s\",\"answers\":{", name);
    for (int answered = 0; answered < REQUESTS;) {
        reply = command("XREAD COUNT 64 BLOCK 10000 STREAMS carpool:{square}:replies:%s %s", name, last);
        if (reply->type != REDIS_REPLY_ARRAY) fail("no replies came");
        redisReply *entries = reply->element[0]->element[1];
        for (size_t n = 0; n < entries->elements; n++) {
            redisReply *entry_id = entries->element[n]->element[0], *fields = entries->element[n]->element[1];
            snprintf(last, sizeof last, "%s", entry_id->str);
            msgpack_object_array results = unpacked(fields->element[1]->str, fields->element[1]->len).via.array;
            for (uint32_t m = 0; m < results.size; m++) {
                msgpack_object correlation_id = field(results.ptr[m], "correlation_id");
                body = field(results.ptr[m], "body");
                printf("%s\"%.*s\":%.*s", answered++ ? "," : "", TEXT(correlation_id), TEXT(body));
            }
        }
    }
    printf("}}\n");

    /* 4. A request that expires while it waits. */
    id = command("XADD carpool:{away}:requests * expiration 50 body 1")->str;
    printf("{\"step\":\"expiration\",\"id\":\"%s\",\"envelope\":%s}\n", id, result("away", id)->str);

    /* 5. An invalid request. */
    id = command("XADD carpool:{square}:requests * priority 11 body 7")->str;
    printf("{\"step\":\"invalid\",\"id\":\"%s\",\"envelope\":%s}\n", id, result("square", id)->str);

    /* 6. Two withdrawn requests: one by its entry, without a result; one by its correlation ID, with one. */
    id = command("XADD carpool:{away}:requests * body 1")->str;
    long long removed = command("XDEL carpool:{away}:requests %s", id)->integer;
    id = command("XADD carpool:{away}:requests * body 1")->str;
    command("XADD carpool:{away}:requests * withdraw %s", id);
    printf("{\"step\":\"withdrawal\",\"removed\":%lld,\"id\":\"%s\",\"envelope\":%s}\n", removed, id,
           result("away", id)->str);
    redisFree(redis);
    return 0;
}
