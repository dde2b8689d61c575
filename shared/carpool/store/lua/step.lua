-- step: write the chunks that a stepping model emitted, and the results of its requests that ended. Each request is
-- alone in its batch.
--
-- Each chunk is written once. The progress of a request counts those that were written, and keeps them for another
-- process (`chunks`, `chunk:N`). The caller says how many it believes there are. If it repeats a call whose reply was
-- lost, they are there already, and are not written again.
--
-- When its memory is full, Redis rejects a script at its first write, unless that never needs memory (see deliver.lua).
-- Chunks of requests that go on are written first, so that they are rejected then, and nothing else is written either:
-- the caller repeats the call without them. A request that ends frees memory, so its last chunks are not rejected.
--
-- KEYS  1 batches   2 settled   3 dead   4.. progress of each batch, lists and reply streams, stored bodies
-- ARGV  1 consumer  2 TTL of progress (ms)  3 maximum length of `settled`, 4 of `dead`
--       5.. list of requests: batch ID; epoch; index in KEYS of its progress, and of the list or reply stream;
--           kind ('list' or 'stream'); result TTL (ms); number of chunks written before; time to the first chunk (us)
--           if it is among these, else ''; list of chunks: as another process needs it, its envelope;
--           final envelope, '' if the request goes on; execution time (us); time that it waited for a process (us);
--           1 if its recorded starts are to be forgotten (see answer.lua), because it was not the cause of a death;
--           what was streamed, if it ends: see encode_streamed; list of stored bodies to delete: index in KEYS; list of
--           the fields of its dead letter, empty if none
-- Returns for each request { state, number of envelopes in its list, or of entries in its reply stream }. State:
--   WRITTEN   the chunks and the result are written
--   FENCED    the consumer does not own the batch any more
--   ANSWERED  a batcher answered it, because it expired or was withdrawn. Its batch is removed
--   MISMATCH  another number of chunks was written: Redis lost its last writes. Begin again from what is there
-- O(requests + chunks), and O(bytes).
local take = argument_reader(5)
local ttl_ms, requests = ARGV[2], {}

local function take_pairs()
  local first, second = {}, {}
  for i = 1, tonumber(take()) do first[i], second[i] = take(), take() end
  return first, second
end

-- The state of a request before anything is written, and whether its chunks were written by an earlier call.
local function look(request)
  if not owns_batch(KEYS[1], ARGV[1], request.id, request.epoch) then return 'FENCED' end
  local progress = redis.call('HMGET', request.progress, 'answered:0', 'chunks')
  if progress[1] then return 'ANSWERED' end
  local chunks = tonumber(progress[2] or 0)
  if chunks == request.written then return 'WRITTEN' end
  if chunks == request.written + #request.kept then return 'WRITTEN', true end
  return 'MISMATCH'
end

for r = 1, tonumber(take()) do
  local request = { id = take(), epoch = take() }
  request.progress, request.target = KEYS[tonumber(take())], KEYS[tonumber(take())]
  request.kind, request.result_ttl_ms = take(), take()
  request.written, request.first_us = tonumber(take()), take()
  request.kept, request.envelopes = take_pairs()
  request.final, request.compute_us, request.waited_us, request.has_passed = take(), take(), take(), take()
  request.streamed, request.bodies, request.dead = take(), take_list(take), take_list(take)
  request.state, request.is_repeated = look(request)
  requests[r] = request
end

local streams, stream_keys = {}, {}
local function write(request, envelope)
  if request.kind == 'list' then return deliver(request.target, 'list', envelope, request.result_ttl_ms) end
  local of_stream = streams[request.target]
  if not of_stream then
    of_stream = { ttl_ms = request.result_ttl_ms }
    streams[request.target] = of_stream
    stream_keys[#stream_keys + 1] = request.target
  end
  of_stream[#of_stream + 1] = envelope
end

local function write_chunks(request)
  if request.is_repeated then return end
  for _, envelope in ipairs(request.envelopes) do write(request, envelope) end
end

for _, request in ipairs(requests) do
  if request.state == 'WRITTEN' and request.final == '' and #request.kept > 0 and not request.is_repeated then
    local fields = { 'chunks', request.written + #request.kept }
    if request.first_us ~= '' then fields[3], fields[4] = 'first_us', request.first_us end
    for i, kept in ipairs(request.kept) do
      fields[#fields + 1] = 'chunk:' .. request.written + i - 1
      fields[#fields + 1] = kept
    end
    redis.call('HSET', request.progress, unpack(fields))
    redis.call('PEXPIRE', request.progress, ttl_ms)
    write_chunks(request)
  end
end

-- After the chunks: a first write that needs no memory would let these be written as well when memory is full.
for _, request in ipairs(requests) do
  if request.state == 'WRITTEN' and request.has_passed == '1' then
    redis.call('HDEL', request.progress, 'started:0')
  end
end

local settled_us
local function settle(request)
  redis.call('XACK', KEYS[1], 'workers', request.id)
  redis.call('XDEL', KEYS[1], request.id)
  redis.call('DEL', request.progress)
  for _, body in ipairs(request.bodies) do redis.pcall('UNLINK', KEYS[tonumber(body)]) end
  if not settled_us then
    local now = redis.call('TIME')
    settled_us = now[1] .. string.format('%06d', now[2])
  end
  redis.pcall('XADD', KEYS[2], 'MAXLEN', '~', ARGV[3], '*', 'batch', request.id, 'worker', ARGV[1], 'size', 1,
    'compute_us', request.compute_us, 'executed', 0, 'waited_us', request.waited_us, 'settled_us', settled_us,
    'streamed', request.streamed)
end

for _, request in ipairs(requests) do
  if request.state == 'ANSWERED' then
    local progress = redis.call('HMGET', request.progress, 'chunks', 'first_us')
    request.streamed = progress[2] and progress[1] .. ' ' .. progress[2] or ''
    settle(request)
  end
  if request.state == 'WRITTEN' and request.final ~= '' then
    settle(request)
    if #request.dead > 0 then redis.pcall('XADD', KEYS[3], 'MAXLEN', '~', ARGV[4], '*', unpack(request.dead)) end
    write_chunks(request)
    write(request, request.final)
  end
end

-- The beginning of a msgpack array of n elements.
local function array_head(n)
  if n < 16 then return string.char(0x90 + n) end
  return string.char(0xdd, 0, math.floor(n / 65536), math.floor(n / 256) % 256, n % 256)
end

for _, key in ipairs(stream_keys) do
  local envelopes = streams[key]
  deliver(key, 'stream', array_head(#envelopes) .. table.concat(envelopes), envelopes.ttl_ms)
end

local replies, unread = {}, {}
for r, request in ipairs(requests) do
  local seen = unread[request.target]
  if not seen then
    seen = request.kind == 'list' and redis.pcall('LLEN', request.target) or redis.pcall('XLEN', request.target)
    if type(seen) ~= 'number' then seen = 0 end  -- its producer made the key another type
    unread[request.target] = seen
  end
  replies[r] = { request.state, seen }
end
return replies
