-- settle: if all seats of a generation serve, it has settled, and what it replaces is wanted no more.
--
-- KEYS  1 wanted  2 seats       3 outcomes  4 leases
-- ARGV  1 model   2 generation
-- Returns 1 if it has; 0 if not, or if it leaves itself. O(replicas of the model).
-- GRANT worker leases zscore
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local generations = generations_of(KEYS[1], ARGV[1])
local settled
for _, generation in ipairs(generations) do
  if generation.generation == tonumber(ARGV[2]) and not generation.leaving then settled = generation end
end
if not settled then return 0 end
for index = 0, settled.replicas - 1 do
  local _, state, node = seat_of(KEYS[2], settled, index)
  local until_ms = state == 'SERVING' and redis.call('ZSCORE', KEYS[4], node)
  if not until_ms or tonumber(until_ms) <= now_ms then return 0 end
end
settled.settled = true
if not settled.share then
  local reason = string.format('GONE generation %d (version %s) replaced it', settled.generation, settled.version)
  for at = #generations, 1, -1 do
    if generations[at].leaving then remove(KEYS[2], KEYS[3], generations, at, reason) end
  end
end
write_generations(KEYS[1], ARGV[1], generations)
return 1
