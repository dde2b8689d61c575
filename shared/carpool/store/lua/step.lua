-- step: write the chunks that a stepping model emitted, and the results of its requests that ended. Each request is
-- alone in its batch.
--
-- Each chunk is written once. The progress of a request counts those that were written, and keeps them for another
-- process (`chunks`, `chunk:N`). The caller says how many it believes there are. If it repeats a call whose reply was
-- lost, they are there already, and are not written again.
--
-- When its memory is full, Redis rejects a script at its first write, unless that never needs memory (see
-- deliver.lua). Chunks of requests that go on are written first, so that they are rejected then, and nothing else is
-- written either: the caller repeats the call without them. A request that ends frees memory, so its last chunks are
-- not rejected.
--
-- This runs for each token, so all requests are one argument, and what can be done once for all of them is.
--
-- KEYS  1 batches   2 settled   3 dead   4 progress prefix (the key of batch ID ''; the ID is appended)
--       5 statistics   6.. lists and reply streams, stored bodies
-- ARGV  1 consumer  2 maximum length of `settled`, 3 of `dead`  4 requests, a msgpack array  5 index in
--       KEYS of the stream of the worker's version, '' if no request is in it  6.. final envelopes
-- A request is an array:
--       1 batch ID  2 epoch  3 index in KEYS of its list or reply stream  4 kind: see deliver.lua  5 result TTL
--       (ms)
--       6 number of chunks written before  7 envelopes of its chunks  8 fields and values of its progress that have
--       them, as another process needs them  9 TTL of its progress (ms), 0 to leave it as it is  10 execution time
--       (us)
--       11 time that it waited for a process (us)  12 stored bodies to delete at its end: indexes in KEYS
--       13 true if its recorded starts are to be forgotten (see answer.lua): it was not the cause of a death
--     if it ended:
--       14 index in ARGV of its final envelope  15 what was streamed: see encode_streamed
--       16 fields and values of its dead letter, empty if none
--       17 those that its entry of `settled` has besides, if it failed
--       18 its time from arrival, and 19 in the queue (us)
-- Returns for each request its state, and the number of envelopes in its list, or of entries in its reply stream:
--   WRITTEN   the chunks and the result are written
--   FENCED    the consumer does not own the batch any more
--   ANSWERED  a batcher answered it, because it expired or was withdrawn. Its batch is removed
--   MISMATCH  another number of chunks was written: Redis lost its last writes. Begin again from what is there
-- O(requests + chunks + batches of the consumer), and O(bytes).
-- GRANT worker batches xpending xack xdel
-- GRANT worker settled xadd
-- GRANT worker dead xadd
-- GRANT worker body unlink
-- GRANT worker result llen
-- GRANT worker replies xlen
-- GRANT worker progress hmget hset hdel pexpire del
local ID, EPOCH, TARGET, KIND, RESULT_TTL, WRITTEN, ENVELOPES, KEPT = 1, 2, 3, 4, 5, 6, 7, 8
local TTL, COMPUTE_US, WAITED_US, BODIES, PASSED, FINAL, STREAMED, DEAD = 9, 10, 11, 12, 13, 14, 15, 16
local FAILED, TOTAL_US, QUEUE_US = 17, 18, 19
local requests = cmsgpack.unpack(ARGV[4])

local of_version = KEYS[tonumber(ARGV[5])]
local function stream_of(batch_id) return entry_of(batch_id) == batch_id and KEYS[1] or of_version end

local epochs = {}  -- of the batches that the consumer owns, by stream and entry ID
for _, stream in ipairs({ KEYS[1], of_version }) do
  epochs[stream] = {}
  for _, pending in ipairs(redis.call('XPENDING', stream, 'workers', '-', '+', 1000000, ARGV[1])) do
    epochs[stream][pending[1]] = pending[4]
  end
end

-- The state of a request before anything is written, and whether its chunks were written by an earlier call.
local function look(id, epoch, written, added)
  if epochs[stream_of(id)][entry_of(id)] ~= epoch then return 'FENCED' end
  local progress = redis.call('HMGET', KEYS[4] .. id, 'answered:0', 'chunks')
  if progress[1] then return 'ANSWERED' end
  local chunks = tonumber(progress[2] or 0)
  if chunks == written then return 'WRITTEN' end
  if chunks == written + added then return 'WRITTEN', true end
  return 'MISMATCH'
end

local states, repeated = {}, {}
for r, request in ipairs(requests) do
  states[r], repeated[r] = look(request[ID], request[EPOCH], request[WRITTEN], #request[ENVELOPES])
end

local streams, stream_keys = {}, {}  -- the envelopes for each reply stream
local lengths = {}                   -- of lists and reply streams
local function write(request, envelope)
  local key, ttl_ms = KEYS[request[TARGET]], request[RESULT_TTL]
  if request[KIND] == 'list' then
    lengths[key] = deliver(key, 'list', envelope, ttl_ms)
    return
  end
  local of_stream = streams[key]
  if not of_stream then
    of_stream = { kind = request[KIND], ttl_ms = ttl_ms }
    streams[key] = of_stream
    stream_keys[#stream_keys + 1] = key
  end
  of_stream[#of_stream + 1] = envelope
end

for r, request in ipairs(requests) do
  local envelopes = request[ENVELOPES]
  if states[r] == 'WRITTEN' and not request[FINAL] and #envelopes > 0 and not repeated[r] then
    local progress = KEYS[4] .. request[ID]
    redis.call('HSET', progress, unpack(request[KEPT]))
    if request[TTL] > 0 then redis.call('PEXPIRE', progress, request[TTL]) end
    for _, envelope in ipairs(envelopes) do write(request, envelope) end
  end
end

-- After the chunks: a first write that needs no memory would let these be written as well when memory is full.
for r, request in ipairs(requests) do
  if states[r] == 'WRITTEN' and request[PASSED] then redis.call('HDEL', KEYS[4] .. request[ID], 'started:0') end
end

local settled_us
local succeeded, success_us, queue_us, infer_us, failed, fail_us = 0, 0, 0, 0, 0, 0
local streamed_requests, streamed_chunks, first_us, later_us = 0, 0, 0, 0
local function count(request)
  if #(request[FAILED] or {}) > 0 then
    failed, fail_us = failed + 1, fail_us + request[TOTAL_US]
    return
  end
  succeeded, success_us = succeeded + 1, success_us + request[TOTAL_US]
  queue_us, infer_us = queue_us + request[QUEUE_US], infer_us + request[COMPUTE_US]
end

local function count_streamed(streamed)
  local chunks, first, later = string.match(streamed, '^(%d+) (%d+) ?(%d*)$')
  if not chunks then return end
  streamed_requests, streamed_chunks = streamed_requests + 1, streamed_chunks + chunks
  first_us, later_us = first_us + first, later_us + (tonumber(later) or 0)
end

local function settle(request, streamed)
  local id = request[ID]
  redis.call('XACK', stream_of(id), 'workers', entry_of(id))
  redis.call('XDEL', stream_of(id), entry_of(id))
  redis.call('DEL', KEYS[4] .. id)
  for _, body in ipairs(request[BODIES]) do redis.pcall('UNLINK', KEYS[body]) end
  if not settled_us then
    local now = redis.call('TIME')
    settled_us = now[1] .. string.format('%06d', now[2])
  end
  count_streamed(streamed)
  redis.pcall('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*', 'batch', id, 'worker', ARGV[1], 'size', 1,
    'compute_us', request[COMPUTE_US], 'executed', 0, 'waited_us', request[WAITED_US], 'settled_us', settled_us,
    'streamed', streamed, unpack(request[FAILED] or {}))
end

for r, request in ipairs(requests) do
  if states[r] == 'ANSWERED' then
    local progress = redis.call('HMGET', KEYS[4] .. request[ID], 'chunks', 'first_us')
    settle(request, progress[2] and progress[1] .. ' ' .. progress[2] or '')
  end
  if states[r] == 'WRITTEN' and request[FINAL] then
    local dead = request[DEAD]
    settle(request, request[STREAMED])
    count(request)
    if #dead > 0 then redis.pcall('XADD', KEYS[3], 'MAXLEN', '~', ARGV[3], '*', unpack(dead)) end
    if not repeated[r] then
      for _, envelope in ipairs(request[ENVELOPES]) do write(request, envelope) end
    end
    write(request, ARGV[request[FINAL]])
  end
end

if succeeded > 0 then
  count_batches(KEYS[5], 1, succeeded, success_us, queue_us, 0, infer_us, 0, settled_us)
end
if failed > 0 then count_failed(KEYS[5], failed, fail_us) end
if streamed_requests > 0 then
  count_streams(KEYS[5], streamed_requests, streamed_chunks, first_us, later_us)
end

-- The beginning of a msgpack array of n elements.
local function array_head(n)
  if n < 16 then return string.char(0x90 + n) end
  return string.char(0xdd, 0, math.floor(n / 65536), math.floor(n / 256) % 256, n % 256)
end

for _, key in ipairs(stream_keys) do
  local envelopes = streams[key]
  deliver(key, envelopes.kind, array_head(#envelopes) .. table.concat(envelopes), envelopes.ttl_ms)
end

local replies = {}
for r, request in ipairs(requests) do
  local key = KEYS[request[TARGET]]
  local length = lengths[key]
  if not length then
    length = redis.pcall(request[KIND] == 'list' and 'LLEN' or 'XLEN', key)
    if type(length) ~= 'number' then length = 0 end  -- its producer made the key another type
    lengths[key] = length
  end
  replies[2 * r - 1], replies[2 * r] = states[r], length
end
return replies
