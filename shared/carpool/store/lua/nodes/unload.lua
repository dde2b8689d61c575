-- unload: a model, or one version of it, is wanted no more. If that replaced another version, the other one stays.
--
-- KEYS  1 wanted  2 seats  3 outcomes
-- ARGV  1 model   2 version, empty for all
-- Returns the number of generations that were wanted. O(replicas of the model).
local generations = generations_of(KEYS[1], ARGV[1])
local before = #generations
for at = before, 1, -1 do
  if ARGV[2] == '' or generations[at].version == ARGV[2] then
    remove(KEYS[2], KEYS[3], generations, at, 'GONE it was unloaded')
  end
end
local removed = before - #generations
restore(KEYS[2], generations)
write_generations(KEYS[1], ARGV[1], generations)
return removed
