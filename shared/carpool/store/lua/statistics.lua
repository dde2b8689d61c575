-- Statistics of a model: a hash in which each script that writes results counts them. So a request is counted once,
-- when its result is written, whatever process ends before or after.
--
-- Each size of batches has a field `batches:N`, with eight numbers as doubles, little endian: the number of batches,
-- and of their requests; of these the time from arrival to result, and that in the queue; the time of the batches
-- before, in and after the model; and when the last one was settled. One field, because a batch changes all of them,
-- and each command costs. Other fields are whole numbers. Durations are in microseconds.
--
-- A user may make the key or a field anything, so no command may raise: then nothing is counted, or from 0 on. Numbers
-- may be text. All of these are O(1).
-- GRANT batcher,worker statistics hincrby
-- GRANT worker statistics hget hset
local SIZES_COUNTED_MAX = 128  -- batches of more requests are counted by the next power of two: fields are few
local NUMBERS, NUMBERS_BYTES = '<dddddddd', 64

-- count_batches(statistics, size, number, total_us, queue_us, input_us, infer_us, output_us, settled_us): batches in
-- each of which `size` requests succeeded.
local function count_batches(statistics, size, number, total_us, queue_us, input_us, infer_us, output_us, settled_us)
  local at_most = tonumber(size)
  if at_most > SIZES_COUNTED_MAX then
    at_most = 2 * SIZES_COUNTED_MAX
    while at_most < tonumber(size) do at_most = 2 * at_most end
  end
  local field = 'batches:' .. at_most
  local known = redis.pcall('HGET', statistics, field)
  local batches, requests, total, queue, input, infer, output = 0, 0, 0, 0, 0, 0, 0
  if type(known) == 'string' and #known == NUMBERS_BYTES then
    batches, requests, total, queue, input, infer, output = struct.unpack(NUMBERS, known)
  end
  redis.pcall('HSET', statistics, field, struct.pack(NUMBERS, batches + number, requests + size * number,
    total + total_us, queue + queue_us, input + input_us, infer + infer_us, output + output_us, settled_us))
end

-- count_streams(statistics, number, chunks, first_us, later_us): streams that ended, their chunks, and the times from
-- arrival to the first chunks, and from these to the last ones, added up.
local function count_streams(statistics, number, chunks, first_us, later_us)
  redis.pcall('HINCRBY', statistics, 'streams', number)
  redis.pcall('HINCRBY', statistics, 'chunks', chunks)
  redis.pcall('HINCRBY', statistics, 'first_us', first_us)
  redis.pcall('HINCRBY', statistics, 'later_us', later_us)
end

-- count_failed(statistics, number, total_us): requests with errors as their results, and their time from arrival.
local function count_failed(statistics, number, total_us)
  redis.pcall('HINCRBY', statistics, 'fail', number)
  redis.pcall('HINCRBY', statistics, 'fail_us', total_us)
end
