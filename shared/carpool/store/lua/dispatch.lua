-- dispatch: waiting requests are removed from the request stream and become batches in flight, all or nothing.
--
-- An entry is missing if it is no longer in the stream: it was removed by XDEL, or taken by another batcher. Its
-- requests are not dispatched, and each batch formed with some of them names the entry in a field `gone`. So a request
-- is dispatched at most once, also when several batchers dispatch, and a withdrawal does not undo the rest of a batch.
-- XDEL returns whether the entry was there: to check first would copy every body into Lua.
--
-- Entries that arrived are put into the order of results first (see ordering/enter.lua): without that, none of their
-- requests may be dispatched. To do so here saves a round trip.
--
-- Of a model with sequences only the active batcher may dispatch: another one, which was paused, would send a request
-- of a sequence beside the one in flight.
--
-- A request that was sent again may have its result already. Its batch names it in a field `answered`, and the worker
-- does not execute it.
--
-- A batch of a bound model is for one process, which is told so in its inbox. It names the process, so that a worker
-- puts it into the pending list of that (see assign.lua): a batcher may not fetch batches.
--
-- A batch that is for one version of the model is added to the stream of that version. If that was removed, because no
-- worker had the version any more, nothing is dispatched: a batcher that was paused does not know it.
--
-- While all living processes of a model drain, nothing is dispatched to a stream: the last of them leaves when that is
-- empty, and a batcher that reads late that it drains would add a batch which then waits for the next process.
--
-- Of a model that is paused nothing is dispatched, from the moment at which an operator's command has returned: a
-- batcher reads of the pause later.
--
-- KEYS  1 requests   2 batches   3 tickets   4 order   5 workers   6 draining   7 batcher
--       .. paused, inboxes, streams of versions, the set of versions
-- ARGV  1 entries to put into the order, '' if none
--       2 of a model with sequences the name of this batcher, else ''
--       3 index in KEYS of paused; 0 if this batcher may not read it, because its rules are older than pauses
--       4.. list of the processes of a bound model that execute these batches
--       index in KEYS of the set of versions, and list of those that these batches are for; the index is 0 for none
--       list of entry IDs
--       list of entries that are dispatched only partly: index of the entry; what to put back (see put_back.lua)
--       batches, a msgpack array: of a stepping model there are many, each with many fields
--       for each batch its field `runs`, which may be large
-- A batch is an array:
--       1 indexes of its entries  2 its other fields and their values
--       3 requests that may have been sent again: for each the index in KEYS of its result, and its correlation ID
--       4 the process that executes it, '' if it is any  5 index in KEYS of the inbox of that process
--       6 index in KEYS of the stream that it is added to
--       7 absent, or for requests that have records (record.lua): how long the model keeps a result at most (ms), then
--         for each the index of its entry, and the index in KEYS of the record
-- Returns 'NOT_ACTIVE' if another batcher has the lease, or none: nothing was written
--       | 'PAUSED' if the model is: nothing was written
--       | 'PROCESS_LEFT' if one of these processes, or all of such a version, have left, or if all processes drain:
--         nothing was written. Else
--         { IDs of missing entries },
--         { for each partly dispatched entry { the IDs of its new entries }, {} if the entry is missing },
--         { for each batch its ID, '' if all of its entries are missing },
--         the number of tickets in the order if ARGV[1] is not '', else -1
-- O(entries), and O(bytes) for the payloads.
-- GRANT batcher requests xdel
-- GRANT batcher batches xadd
-- GRANT batcher workers zscore zrevrangebyscore
-- GRANT batcher draining scard sismember
-- GRANT batcher batcher get
-- GRANT batcher paused exists
-- GRANT batcher versions sismember
local function all_drain(workers, draining)
  local number = redis.call('SCARD', draining)
  if number == 0 then return false end
  local time = redis.call('TIME')
  local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  -- Of more processes than that, one at least does not drain.
  for _, process in ipairs(redis.call('ZREVRANGEBYSCORE', workers, '+inf', now_ms, 'LIMIT', 0, number + 1)) do
    if redis.call('SISMEMBER', draining, process) == 0 then return false end
  end
  return true
end

if ARGV[2] ~= '' and redis.call('GET', KEYS[7]) ~= ARGV[2] then return 'NOT_ACTIVE' end
if ARGV[3] ~= '0' and redis.call('EXISTS', KEYS[tonumber(ARGV[3])]) == 1 then return 'PAUSED' end
local take = argument_reader(4)
local processes = take_list(take)
for _, process in ipairs(processes) do
  if ARGV[2] ~= '' and not redis.call('ZSCORE', KEYS[5], process) then return 'PROCESS_LEFT' end
end
if #processes == 0 and all_drain(KEYS[5], KEYS[6]) then return 'PROCESS_LEFT' end
local versions = tonumber(take())
for _, version in ipairs(take_list(take)) do
  if redis.call('SISMEMBER', KEYS[versions], version) == 0 then return 'PROCESS_LEFT' end
end

local ids, is_missing, missing = take_list(take), {}, {}
for i = 1, #ids do
  if redis.call('XDEL', KEYS[1], ids[i]) == 0 then
    is_missing[i] = true
    missing[#missing + 1] = ids[i]
  end
end

if ARGV[1] ~= '' then enter_order(KEYS[4], KEYS[3], ARGV[1]) end

local new_ids = {}
for p = 1, tonumber(take()) do
  if is_missing[tonumber(take())] then
    skip_put_back(take)
    new_ids[p] = {}
  else
    new_ids[p] = put_back(KEYS[1], KEYS[3], take)
  end
end

local ENTRIES, FIELDS, PERHAPS_ANSWERED, PROCESS, INBOX, STREAM, RECORDS = 1, 2, 3, 4, 5, 6, 7
local batch_ids, is_answered = {}, answered_reader()
for b, batch in ipairs(cmsgpack.unpack(take())) do
  local entries, fields, sought = batch[ENTRIES], batch[FIELDS], batch[PERHAPS_ANSWERED]
  local missing_here = {}
  for _, index in ipairs(entries) do
    if is_missing[index] then missing_here[#missing_here + 1] = ids[index] end
  end
  fields[#fields + 1] = 'runs'
  fields[#fields + 1] = take()
  local answered = {}
  for i = 1, #sought, 2 do
    if is_answered(KEYS[sought[i]]) then answered[#answered + 1] = sought[i + 1] end
  end
  if #answered > 0 then
    fields[#fields + 1] = 'answered'
    fields[#fields + 1] = table.concat(answered, ' ')
  end
  batch_ids[b] = ''
  if #missing_here < #entries then
    if #missing_here > 0 then
      fields[#fields + 1] = 'gone'
      fields[#fields + 1] = table.concat(missing_here, ' ')
    end
    batch_ids[b] = redis.call('XADD', KEYS[batch[STREAM]], '*', unpack(fields))
    if batch[PROCESS] ~= '' then tell_process(KEYS[batch[INBOX]], 'batch', batch_ids[b]) end
  end
  local records = batch[RECORDS] or {}
  for r = 2, #records, 2 do
    if not is_missing[records[r]] then mark_in_flight(KEYS[records[r + 1]], records[1]) end
  end
end

return { missing, new_ids, batch_ids, ARGV[1] ~= '' and count_tickets(KEYS[4], KEYS[3]) or -1 }
