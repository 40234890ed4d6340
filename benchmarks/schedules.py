from moved import run

run(__file__)
