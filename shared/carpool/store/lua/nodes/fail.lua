-- fail: a generation that has not settled cannot be loaded. What served before it stays; of itself only what serves
-- remains, until all of the other one serves again.
--
-- KEYS  1 wanted  2 seats       3 outcomes
-- ARGV  1 model   2 generation  3 why, for people
-- Returns 1; 0 if it is not wanted, leaves, or has settled. O(replicas of the model).
local generations = generations_of(KEYS[1], ARGV[1])
for at, generation in ipairs(generations) do
  if generation.generation == tonumber(ARGV[2]) and not generation.settled and not generation.leaving then
    generation.leaving, generation.failed = true, true
    local outcome = 'FAILED ' .. ARGV[3]
    conclude(KEYS[3], generation, outcome)
    local stays = restore(KEYS[2], KEYS[3], generations)
    if generation.share or not stays then
      remove(KEYS[2], KEYS[3], generations, at, outcome)
    else
      leave(KEYS[2], KEYS[3], generations, stays, outcome)
    end
    write_generations(KEYS[1], ARGV[1], generations)
    return 1
  end
end
return 0
