-- commit: a worker writes the results of a batch, and the batch is settled, all or nothing. The dead letters of
-- requests that were given up go with it (bury).
--
-- FENCED unless the worker still owns the batch at this epoch (XACK alone does not look who calls it). A
-- request that was answered ahead of the commit (expired in flight, or executed alone after a redelivery) must
-- be left out, or its producer would get two results: the worker is told which, and commits again without.
-- XACK comes first because Redis allows it when memory is full; see deliver.
--
-- KEYS  1 batches   2 settled   3 progress of this batch   4 dead   5 order   6 held   7.. the keys of results
-- ARGV  1 consumer  2 batch ID  3 epoch  4 result TTL (ms)  5 longest `settled`  6 longest `dead`
--       7.. X, then X positions left out
--       S, then S strings: the fields for `settled`
--       R, then R times: index in KEYS, kind, ticket or '', payload
--       L, then L times: number of field strings, the fields of a dead letter
-- Returns 'OK' | 'FENCED' | { positions answered meanwhile } | 'MORE': OK, and there is more to release
-- O(results), and O(bytes) for the payloads.
local owner = redis.call('XPENDING', KEYS[1], 'workers', ARGV[2], ARGV[2], 1)[1]
if not owner or owner[2] ~= ARGV[1] or owner[4] ~= tonumber(ARGV[3]) then return 'FENCED' end

local at = 7
local function take()
  local value = ARGV[at]
  at = at + 1
  return value
end

local left_out = {}
for _ = 1, tonumber(take()) do left_out[take()] = true end
local answered = {}
for _, field in ipairs(redis.call('HKEYS', KEYS[3])) do
  local position = string.match(field, '^answered:(%d+)$')
  if position and not left_out[position] then answered[#answered + 1] = tonumber(position) end
end
if #answered > 0 then return answered end

-- From here nothing may fail, or what was done before would stay: keys that somebody made of another type go
-- without.
redis.call('XACK', KEYS[1], 'workers', ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[2])
redis.call('DEL', KEYS[3])
local settled = {}
for i = 1, tonumber(take()) do settled[i] = take() end
redis.pcall('XADD', KEYS[2], 'MAXLEN', '~', ARGV[5], '*', unpack(settled))
local ordered = false
for _ = 1, tonumber(take()) do
  local key, kind, ticket, payload = KEYS[tonumber(take())], take(), take(), take()
  ordered = ordered or ticket ~= ''
  deliver_in_order(KEYS[6], ticket, key, kind, payload, ARGV[4])
end
for _ = 1, tonumber(take()) do
  local letter = {}
  for i = 1, tonumber(take()) do letter[i] = take() end
  redis.pcall('XADD', KEYS[4], 'MAXLEN', '~', ARGV[6], '*', unpack(letter))
end
if ordered and release(KEYS[5], KEYS[6]) == 1 then return 'MORE' end
return 'OK'
