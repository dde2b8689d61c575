-- yield: a seat of a generation that leaves is given up, so that one that replaces it has room. Of those that serve
-- never so many that fewer are left than the replicas of what settled last, less one, or none.
--
-- KEYS  1 wanted  2 seats  3 outcomes  4 leases
-- ARGV  1 model   2 generation         3 number of the seat
-- Returns 1 if it is; 0 if it must go on serving. O(replicas of the model).
-- GRANT worker seats hset
-- GRANT worker leases zscore
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local leaves, serving, replicas = nil, 0, 1
for _, generation in ipairs(generations_of(KEYS[1], ARGV[1])) do
  if generation.settled and not generation.share then replicas = generation.replicas end
  if generation.generation == tonumber(ARGV[2]) and generation.leaving then leaves = generation end
  for index = 0, generation.replicas - 1 do
    local _, state, node = seat_of(KEYS[2], generation, index)
    local until_ms = state == 'SERVING' and redis.call('ZSCORE', KEYS[4], node)
    if until_ms and tonumber(until_ms) > now_ms then serving = serving + 1 end
  end
end
if not leaves then return 0 end
local name, state, node = seat_of(KEYS[2], leaves, tonumber(ARGV[3]))
if state == 'SERVING' then
  if serving - 1 < math.max(1, replicas - 1) then return 0 end
elseif state ~= 'LOADING' then
  return 0
end
redis.call('HSET', KEYS[2], name, 'YIELDED ' .. node)
return 1
