"""`prefix-gateway replay`: what recorded traffic would have done on a fleet, under each way of placing it."""
