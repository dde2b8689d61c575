"""Find good settings for a model: by simulation, and from measurements of the live model.

simulate   `carpool simulate`
tune       `carpool tune`
simulator  virtual time: the production scheduler between simulated producers and model processes
fleet      the same with workers that an autoscaler starts and stops
arrivals   when requests arrive: at random, in bursts, like days, or as recorded
curve      l(n) as measured, with straight lines between
live       what the simulator needs to know of a live model
observed   which batch sizes were observed
calibrate  measures a live model, with bursts of requests
search     the best settings within a latency
processes  how many model processes a rate needs
plot       the plot of `carpool tune`
"""
