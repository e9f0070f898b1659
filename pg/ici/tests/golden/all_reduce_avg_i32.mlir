module @all_reduce attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 4 : i32} {
  func.func public @main(%arg0: tensor<1x8x128xi32>) -> (tensor<1x8x128xi32>) {
    %0 = "stablehlo.all_reduce"(%arg0) ({
    ^bb0(%a: tensor<i32>, %b: tensor<i32>):
      %c = stablehlo.add %a, %b : tensor<i32>
      stablehlo.return %c : tensor<i32>
    }) {replica_groups = dense<[[0, 2], [3, 1]]> : tensor<2x2xi64>} : (tensor<1x8x128xi32>) -> tensor<1x8x128xi32>
    %1 = stablehlo.constant dense<2> : tensor<1x8x128xi32>
    %2 = stablehlo.divide %0, %1 : tensor<1x8x128xi32>
    return %2 : tensor<1x8x128xi32>
  }
}
