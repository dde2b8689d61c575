/* Replays recorded commands to Redis, over and over, and measures how long that takes: the floor of any client.
 *
 *   floor HOST PORT TRACE SECONDS
 *
 * TRACE is written by floor.py. A command's arguments consist of bytes and of references to entry IDs, which Redis
 * assigns anew in every cycle: an ID in the reply to an earlier command of the same cycle, or the last ID that was
 * read from a stream. Commands are sent without waiting as long as they refer to no reply that is missing.
 * Prints a JSON object: cycles, seconds, and the median and the 99th percentile of a cycle in us.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { ID_BYTES_MAX = 48, IDS_MAX = 4096 };
enum { LARGE_BYTES = 4096 };
enum { LITERAL = 0, ID_OF_REPLY = 1, LAST_OF_STREAM = 2 };

typedef struct { char text[ID_BYTES_MAX]; } Id;
typedef struct { uint32_t kind, a, b; const char *bytes; } Part; /* LITERAL: a bytes; else: a, b are indexes */
typedef struct { uint32_t parts; Part *part; } Argument;
typedef struct { uint32_t reads, arguments, ids; Argument *argument; Id *id; } Command;
typedef struct { uint32_t name_bytes; const char *name; Id last; } Stream;

static Command *commands;
static Stream *streams;
static uint32_t command_count, stream_count;
static int connection;
static char *input, *output;
static size_t input_size = 1 << 20, input_start, input_end, output_size = 1 << 20, output_end;

static void fail(const char *reason) { fprintf(stderr, "floor: %s\n", reason); exit(1); }

static double now_s(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* --- the trace --- */

static const char *at;

static uint32_t take_number(void) { uint32_t number; memcpy(&number, at, 4); at += 4; return number; }
static const char *take_bytes(uint32_t count) { const char *bytes = at; at += count; return bytes; }

static void load_trace(const char *path) {
  FILE *file = fopen(path, "rb");
  if (!file) fail("the trace cannot be read");
  fseek(file, 0, SEEK_END);
  long size = ftell(file);
  rewind(file);
  char *data = malloc((size_t)size);
  if (fread(data, 1, (size_t)size, file) != (size_t)size) fail("the trace cannot be read");
  fclose(file);
  at = data;
  streams = calloc(stream_count = take_number(), sizeof *streams);
  for (uint32_t s = 0; s < stream_count; s++) {
    streams[s].name_bytes = take_number();
    streams[s].name = take_bytes(streams[s].name_bytes);
    uint32_t bytes = take_number();
    memcpy(streams[s].last.text, take_bytes(bytes), bytes);
  }
  commands = calloc(command_count = take_number(), sizeof *commands);
  for (uint32_t c = 0; c < command_count; c++) {
    commands[c].reads = take_number();
    commands[c].id = calloc(IDS_MAX, sizeof(Id));
    commands[c].argument = calloc(commands[c].arguments = take_number(), sizeof(Argument));
    for (uint32_t a = 0; a < commands[c].arguments; a++) {
      Argument *argument = &commands[c].argument[a];
      argument->part = calloc(argument->parts = take_number(), sizeof(Part));
      for (uint32_t p = 0; p < argument->parts; p++) {
        Part *part = &argument->part[p];
        part->kind = take_number();
        part->a = take_number();
        if (part->kind == LITERAL) part->bytes = take_bytes(part->a);
        else part->b = take_number();
      }
    }
  }
}

/* --- sending --- */

static void put(const char *bytes, size_t count) {
  while (output_end + count > output_size) output = realloc(output, output_size *= 2);
  memcpy(output + output_end, bytes, count);
  output_end += count;
}

static void flush(void) {
  for (size_t sent = 0; sent < output_end;) {
    ssize_t count = write(connection, output + sent, output_end - sent);
    if (count <= 0) fail("Redis closed the connection");
    sent += (size_t)count;
  }
  output_end = 0;
}

static const char *part_text(const Part *part, size_t *bytes) {
  const char *text = part->kind == LITERAL ? part->bytes
                   : part->kind == ID_OF_REPLY ? commands[part->a].id[part->b].text : streams[part->a].last.text;
  *bytes = part->kind == LITERAL ? part->a : strlen(text);
  return text;
}

static void put_command(const Command *command) {
  char head[32];
  put(head, (size_t)sprintf(head, "*%u\r\n", command->arguments));
  for (uint32_t a = 0; a < command->arguments; a++) {
    const Argument *argument = &command->argument[a];
    size_t total = 0, bytes;
    for (uint32_t p = 0; p < argument->parts; p++) { part_text(&argument->part[p], &bytes); total += bytes; }
    put(head, (size_t)sprintf(head, "$%zu\r\n", total));
    for (uint32_t p = 0; p < argument->parts; p++) {
      const char *text = part_text(&argument->part[p], &bytes);
      put(text, bytes);
    }
    put("\r\n", 2);
  }
}

/* Whether all replies that a command refers to are there. */
static int is_ready(const Command *command, uint32_t replies) {
  for (uint32_t a = 0; a < command->arguments; a++)
    for (uint32_t p = 0; p < command->argument[a].parts; p++) {
      const Part *part = &command->argument[a].part[p];
      if (part->kind == ID_OF_REPLY && part->a >= replies) return 0;
      if (part->kind == LAST_OF_STREAM && part->b > replies) return 0; /* b: replies that must be there */
    }
  return 1;
}

/* --- receiving --- */

static void receive_more(void) {
  if (input_start > 0 && input_start == input_end) input_start = input_end = 0;
  if (input_end == input_size) {
    if (input_start > 0) {
      memmove(input, input + input_start, input_end - input_start);
      input_end -= input_start;
      input_start = 0;
    } else input = realloc(input, input_size *= 2);
  }
  ssize_t count = read(connection, input + input_end, input_size - input_end);
  if (count <= 0) fail("no reply within 2 s: the commands do not fit together");
  input_end += (size_t)count;
}

/* The end of the value that begins at `from`, or 0 if it is not all there. Offsets are relative to input_start. */
static size_t end_of(size_t from) {
  const char *data = input + input_start;
  size_t size = input_end - input_start;
  const char *line = from < size ? memmem(data + from, size - from, "\r\n", 2) : NULL;
  if (!line) return 0;
  size_t next = (size_t)(line - data) + 2;
  long number = atol(data + from + 1);
  switch (data[from]) {
    case '+': case ':': return next;
    case '-': fprintf(stderr, "%.*s\n", (int)(next - from), data + from); fail("Redis answered with an error");
              return 0;
    case '$': return number < 0 ? next : next + (size_t)number + 2 <= size ? next + (size_t)number + 2 : 0;
    case '*': for (long n = 0; n < number && next; n++) next = end_of(next);
              return next;
    default: fail("an unknown reply"); return 0;
  }
}

/* All that looks like an entry ID (13 digits, '-', digits), in the order of the reply. */
static void find_ids(Command *command, const char *data, size_t size) {
  command->ids = 0;
  size_t digits = 0;
  for (size_t i = 0; i < size; i++) {
    if (data[i] >= '0' && data[i] <= '9') { digits++; continue; }
    if (data[i] == '-' && digits == 13 && i + 1 < size && data[i + 1] >= '0' && data[i + 1] <= '9') {
      size_t end = i + 1;
      while (end < size && data[end] >= '0' && data[end] <= '9') end++;
      if (command->ids < IDS_MAX && end - i + 13 < ID_BYTES_MAX) {
        Id *id = &command->id[command->ids++];
        memcpy(id->text, data + i - 13, end - i + 13);
        id->text[end - i + 13] = 0;
      }
      i = end - 1;
    }
    digits = 0;
  }
}

static const char *bulk(const char **data, uint32_t *bytes) {
  *bytes = (uint32_t)atol(*data + 1);
  const char *text = strstr(*data, "\r\n") + 2;
  *data = text + *bytes + 2;
  return text;
}

/* The reply to XREAD: [[stream, [[ID, [field ...]] ...]] ...]. The last ID of each stream is kept. */
static void note_last_ids(size_t size) {
  const char *data = input + input_start;
  long count = atol(data + 1);
  size_t from = (size_t)((char *)memmem(data, size, "\r\n", 2) - data) + 2;
  for (long s = 0; s < count; s++) {
    size_t stream_end = end_of(from);
    const char *cursor = strstr(data + from, "\r\n") + 2;
    uint32_t bytes;
    const char *name = bulk(&cursor, &bytes);
    Stream *stream = NULL;
    for (uint32_t i = 0; i < stream_count; i++)
      if (streams[i].name_bytes == bytes && !memcmp(streams[i].name, name, bytes)) stream = &streams[i];
    long entries = atol(cursor + 1);
    size_t entry = (size_t)(strstr(cursor, "\r\n") + 2 - data);
    for (long e = 0; e < entries; e++) {
      if (e == entries - 1 && stream) {
        const char *inside = strstr(data + entry, "\r\n") + 2;
        const char *id = bulk(&inside, &bytes);
        memcpy(stream->last.text, id, bytes);
        stream->last.text[bytes] = 0;
      }
      entry = end_of(entry);
    }
    from = stream_end;
  }
}

static void receive(Command *command) {
  size_t size;
  while ((size = end_of(0)) == 0) receive_more();
  /* A large body has no IDs, and to look for some would count as work of Redis's client. */
  if (input[input_start] != '$' || size < LARGE_BYTES) find_ids(command, input + input_start, size);
  /* A read may find nothing, if one before it found more than it did in the recording. */
  if (command->reads && input[input_start + 1] != '-') note_last_ids(size);
  input_start += size;
}

static void cycle(void) {
  uint32_t sent = 0, received = 0;
  while (received < command_count) {
    while (sent < command_count && is_ready(&commands[sent], received)) put_command(&commands[sent++]);
    if (output_end) flush();
    receive(&commands[received++]);
  }
}

static int compare(const void *left, const void *right) {
  double difference = *(const double *)left - *(const double *)right;
  return (difference > 0) - (difference < 0);
}

int main(int argc, char **argv) {
  if (argc != 5) fail("usage: floor HOST PORT TRACE SECONDS");
  input = malloc(input_size);
  output = malloc(output_size);
  load_trace(argv[3]);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(argv[2]))};
  inet_pton(AF_INET, argv[1], &address.sin_addr);
  connection = socket(AF_INET, SOCK_STREAM, 0);
  int yes = 1;
  struct timeval timeout = {.tv_sec = 2};
  setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
  if (connect(connection, (struct sockaddr *)&address, sizeof address)) fail("cannot connect");
  size_t cycles = 0, capacity = 1 << 20;
  double *us = malloc(capacity * sizeof *us), started_s = now_s(), end_s = started_s + atof(argv[4]), before_s;
  while ((before_s = now_s()) < end_s) {
    cycle();
    if (cycles < capacity) us[cycles] = (now_s() - before_s) * 1e6;
    cycles++;
  }
  double seconds = now_s() - started_s;
  size_t kept = cycles < capacity ? cycles : capacity;
  qsort(us, kept, sizeof *us, compare);
  printf("{\"cycles\": %zu, \"seconds\": %.6f, \"p50_us\": %.1f, \"p99_us\": %.1f}\n", cycles, seconds, us[kept / 2],
         us[kept * 99 / 100]);
  return 0;
}
